"""``python -m swarm.demo``: a swarm of three nodes on this machine answers a question.

Each node is a process of its own that loads a third of the layers; the chat is another one. Nothing is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from swarm.artifact import embedded
from swarm.artifact.manifest import Manifest, load_manifest
from swarm.errors import SwarmError, UsageError

QUESTION = "What is the capital of France?"
START_SECONDS = 180.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.05


class NodeProcess:
    """One ``swarm-node`` child whose output goes to a file of its own. ``stop`` ends it the way a user would."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        self._output: IO[bytes] = log.open("wb")
        command = [sys.executable, "-m", "swarm.node.cli", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the first match in the output; raises ``SwarmError`` with the last lines when the node ends first."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            match = re.search(pattern, self._log.read_text(errors="replace"))
            if match:
                return match
            if ended:
                break
            time.sleep(POLL_SECONDS)
        raise SwarmError(f"a node did not start: {self.last_line()} (whole output: {self._log})")

    def last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def join(self) -> None:
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


def thirds(manifest: Manifest, n_nodes: int) -> list[tuple[int, int]]:
    """Spans of about equal size that meet at legal cuts."""
    cuts = [0, *manifest.legal_cuts, manifest.n_layers]
    wanted = [round(manifest.n_layers * i / n_nodes) for i in range(n_nodes + 1)]
    edges = sorted({min(cuts, key=lambda cut: abs(cut - edge)) for edge in wanted})
    if len(edges) != n_nodes + 1:
        raise UsageError(f"{manifest.name} can't be cut in {n_nodes} spans: try --nodes {len(edges) - 1}")
    return list(zip(edges, edges[1:], strict=False))


@contextlib.contextmanager
def local_swarm(model: Path, spans: Sequence[tuple[int, int]], folder: Path) -> Iterator[str]:
    """Run one node per span and yield the first one's address; all are stopped at the end."""
    nodes: list[NodeProcess] = []
    try:
        peers = ["--new-swarm"]
        for number, (first, last) in enumerate(spans):
            print(f"starting node {number + 1} of {len(spans)} with layers {first}-{last}", file=sys.stderr, flush=True)
            identity = str(folder / f"node{number}.key")
            fixed = ["--model", str(model), "--layers", f"{first}:{last}", "--listen", "127.0.0.1:0"]
            nodes.append(NodeProcess([*fixed, "--identity", identity, *peers], folder / f"node{number}.log"))
            if number == 0:
                address = nodes[0].wait_for(r"--initial-peers (/\S+)")[1]
                peers = ["--initial-peers", address]
        for node in nodes:
            print(node.wait_for(r"(?m)^ready:.*$")[0], file=sys.stderr, flush=True)
        yield address
    finally:
        for node in nodes:
            node.stop()
        for node in nodes:
            node.join()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m swarm.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file (default: SmolLM2-135M, fetched when it is not there)")
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes (default: %(default)s)")
    parser.add_argument("--prompt", default=QUESTION, help="what to ask (default: %(default)r)")
    options = parser.parse_args(arguments)
    try:
        return run(options.model or embedded.fetch(), options.nodes, options.prompt)
    except SwarmError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run(model: Path, n_nodes: int, prompt: str) -> int:
    manifest = load_manifest(model)
    with tempfile.TemporaryDirectory(prefix="glm-swarm-demo-") as folder:
        with local_swarm(model, thirds(manifest, n_nodes), Path(folder)) as address:
            print(f"asking: {prompt}\n", file=sys.stderr, flush=True)
            chat = [sys.executable, "-m", "swarm.chat.cli", "--initial-peers", address]
            asked = subprocess.run([*chat, "--greedy", "--show-route", "-p", prompt], check=False)
        print("\nall nodes stopped", file=sys.stderr)
        return asked.returncode


if __name__ == "__main__":
    sys.exit(main())

"""Nodes as child processes of this one: a whole swarm on one machine, for the demo, the tests and the benchmarks."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from swarm.artifact.manifest import Manifest
from swarm.errors import SwarmError, UsageError

START_SECONDS = 180.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.02
ADDRESS = r"--initial-peers (/\S+)"
READY = r"(?m)^ready:.*$"


class NodeProcess:
    """One ``swarm-node`` child whose output goes to ``log``. ``stop`` asks it to leave, ``join`` waits until it has.

    ``module`` is what Python runs: tests put theirs around the node's command line.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, *, prefix: Sequence[str] = (), module: str = "swarm.node.cli"
    ) -> None:
        self.log = log
        self._output: IO[bytes] = log.open("wb")
        command = [*prefix, sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output)

    def wait_for(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        """Return the first match in the output; raises ``SwarmError`` with its last line when the node ends first."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.text())
            if match:
                return match
            if ended:
                break
            time.sleep(POLL_SECONDS)
        raise SwarmError(f"a node did not come up: {self.last_line()}; its whole output is in {self.log}")

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def last_line(self) -> str:
        lines = self.text().strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def join(self) -> int:
        """Wait for the end, killing it after ``STOP_SECONDS``; returns the exit code."""
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._output.close()
        return code


@dataclass(frozen=True)
class LocalSwarm:
    """A running swarm: ``address`` is the first node's, to be given as ``--initial-peers``."""

    address: str
    nodes: tuple[NodeProcess, ...]


def even_spans(manifest: Manifest, n_nodes: int) -> list[tuple[int, int]]:
    """Spans of about equal length that meet at legal cuts."""
    wanted = [round(manifest.n_layers * i / n_nodes) for i in range(n_nodes + 1)]
    edges = sorted({min(manifest.cuts, key=lambda cut: abs(cut - edge)) for edge in wanted})
    if len(edges) != n_nodes + 1:
        raise UsageError(f"{manifest.name} can't be cut in {n_nodes} spans: ask for {len(edges) - 1}")
    return list(itertools.pairwise(edges))


@contextlib.contextmanager
def postponed_signals() -> Iterator[None]:
    """A signal that comes inside is handled at the end: one between a fork and its return would leave a child that
    nobody knows of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    caught = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in caught:
        signal.signal(number, lambda arriving, _frame: arrived.append(arriving))
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
        for arriving in arrived:
            signal.raise_signal(arriving)


@contextlib.contextmanager
def local_swarm(
    model: Path,
    spans: Sequence[tuple[int, int]],
    folder: Path,
    options: Sequence[str] = (),
    *,
    module: str = "swarm.node.cli",
) -> Iterator[LocalSwarm]:
    """Run one node per span on loopback until the block ends; logs and keys go to ``folder``.

    ``module`` is what runs instead of the node's command line. Progress is printed to stderr. Raises ``SwarmError``
    when a node does not come up. All nodes are gone afterwards.
    """
    nodes: list[NodeProcess] = []
    peers = ["--new-swarm"]
    try:
        for number, (first, last) in enumerate(spans):
            print(f"starting node {number + 1} of {len(spans)}: layers {first}:{last}", file=sys.stderr, flush=True)
            fixed = ["--model", str(model), "--layers", f"{first}:{last}", "--listen", "127.0.0.1:0"]
            fixed += ["--identity", str(folder / f"node{number}.key"), *options]
            with postponed_signals():
                nodes.append(NodeProcess([*fixed, *peers], folder / f"node{number}.log", module=module))
            if number == 0:
                peers = ["--initial-peers", nodes[0].wait_for(ADDRESS)[1]]
        for node in nodes:
            print(node.wait_for(READY)[0], file=sys.stderr, flush=True)
        yield LocalSwarm(peers[1], tuple(nodes))
    finally:
        for node in nodes:
            node.stop()
        for node in nodes:
            node.join()

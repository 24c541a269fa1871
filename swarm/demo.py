"""``python -m swarm.demo``: a swarm of three nodes on this machine answers a question.

Each node is a process of its own that loads a third of the layers; the chat is another one. Nothing is left behind.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from swarm.artifact import embedded
from swarm.artifact.catalog import find_model
from swarm.artifact.manifest import load_manifest
from swarm.errors import SwarmError
from swarm.local_swarm import even_spans, local_swarm

QUESTION = "What is the capital of France?"
SYSTEM = "Answer in one short sentence."  # so small a model rambles without


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m swarm.demo", description="A swarm of nodes on this machine answers a question."
    )
    parser.add_argument("--model", default=embedded.NAME, help="name or GGUF file (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes (default: %(default)s)")
    parser.add_argument("--expect", metavar="ANSWER", help="fail when the answer is another")
    parser.add_argument("--prompt", default=QUESTION, help="what to ask (default: %(default)r)")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # they stop the nodes, as Ctrl-C does
    folder = Path(tempfile.mkdtemp(prefix="glm-swarm-demo-"))
    try:
        code = run(find_model(options.model).path, options.nodes, options.prompt, folder, options.expect)
    except SwarmError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        code = 130
    shutil.rmtree(folder)  # kept after an error: the message names the log in it
    return code


def run(model: Path, n_nodes: int, prompt: str, folder: Path, expected: str | None = None) -> int:
    manifest = load_manifest(model)
    with local_swarm(model, even_spans(manifest, n_nodes), folder) as swarm:
        print(f"asking: {prompt}\n", file=sys.stderr, flush=True)
        chat = [sys.executable, "-m", "swarm.chat.cli", "--initial-peers", swarm.address, "--greedy", "--show-route"]
        chat += ["--show-thinking", "--system", SYSTEM, "-p", prompt]
        code = subprocess.run(chat, check=False).returncode if expected is None else _compared(chat, expected)
    print("\nall nodes stopped", file=sys.stderr)
    return code


def _compared(chat: list[str], expected: str) -> int:
    """The chat's exit code, 1 when it answered something else."""
    done = subprocess.run(chat, check=False, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode == 0 and done.stdout.strip() != expected:
        print(f"demo: {expected!r} was expected; the model or the engine is not the right one", file=sys.stderr)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

"""A swarm of node processes with replicas, whose members can be struck and are replaced after each test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from swarm.local_swarm import ADDRESS, READY, NodeProcess

OPTIONS = ("--slots", "2x512", "--threads", "1", "--memory", "1GiB", "--chunk-tokens", "32")


class Yard:
    """Nodes by name, such as ``b1``: the second one of the second span. The first to start is the bootstrap node
    ``root``, which serves nothing that the tests need and is never struck."""

    def __init__(self, model: Path, folder: Path, options: Sequence[str] = OPTIONS) -> None:
        self.model = model
        self._folder = folder
        self._options = options
        self._nodes: dict[str, NodeProcess] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._starts = 0
        self.address = ""

    def start(self, names: dict[str, tuple[int, int]]) -> None:
        """All at once; returns when every one is ready."""
        for name, span in names.items():
            self._spans[name] = span
            self._nodes[name] = self._process(name)
            if not self.address:
                self.address = self._nodes[name].wait_for(ADDRESS)[1]
        for name in names:
            self._nodes[name].wait_for(READY)

    def _process(self, name: str) -> NodeProcess:
        self._starts += 1
        first, last = self._spans[name]
        peers = ["--initial-peers", self.address] if self.address else ["--new-swarm"]
        fixed = ["--model", str(self.model), "--layers", f"{first}:{last}", "--listen", "127.0.0.1:0", "--name", name]
        key = ["--identity", str(self._folder / f"{name}-{self._starts}.key")]
        journals = ["--journal-dir", str(self._folder / "journals")]
        log = self._folder / f"{name}-{self._starts}.log"
        return NodeProcess([*fixed, *key, *journals, *self._options, *peers], log)

    def __getitem__(self, name: str) -> NodeProcess:
        return self._nodes[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def kill(self, name: str) -> None:
        """As a power cut would: the node, its engine and its network."""
        process = psutil.Process(self._nodes[name].process.pid)
        for member in [process, *process.children(recursive=True)]:
            os.kill(member.pid, signal.SIGKILL)
        self._nodes[name].process.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the node and its children."""
        process = psutil.Process(self._nodes[name].process.pid)
        for member in [process, *process.children(recursive=True)]:
            os.kill(member.pid, number)

    def kill_engine(self, name: str) -> None:
        os.kill(self.engine(name).pid, signal.SIGKILL)

    def engine(self, name: str) -> psutil.Process:
        children = psutil.Process(self._nodes[name].process.pid).children()
        return next(child for child in children if child.name() != "p2pd")

    def revive(self) -> None:
        """Starts the dead again, as new peers."""
        dead = [name for name, node in self._nodes.items() if node.process.poll() is not None]
        for name in dead:
            self._nodes[name].join()
            self._nodes[name] = self._process(name)
        for name in dead:
            self._nodes[name].wait_for(READY)

    def children(self) -> dict[str, int]:
        """How many processes each node owns."""
        return {name: len(psutil.Process(node.process.pid).children()) for name, node in self._nodes.items()}

    def journal_files(self) -> int:
        """Unnamed files that the nodes hold open."""
        folder = str(self._folder / "journals")
        return sum(link.startswith(folder) for node in self._nodes.values() for link in _open_files(node.process.pid))

    def stop(self) -> None:
        for node in self._nodes.values():
            if node.process.poll() is None:
                node.stop()
        for node in self._nodes.values():
            node.join()


def _open_files(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield str(link.readlink())
        except OSError:
            continue  # closed meanwhile


@contextmanager
def yard(
    model: Path, folder: Path, names: dict[str, tuple[int, int]], options: Sequence[str] = OPTIONS
) -> Iterator[Yard]:
    made = Yard(model, folder, options)
    try:
        made.start(names)
        yield made
    finally:
        made.stop()

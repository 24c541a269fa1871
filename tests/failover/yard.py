"""A swarm of node processes with replicas, whose members can be struck and are replaced after each test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from swarm.local_swarm import ADDRESS, READY, NodeProcess

OPTIONS = ("--slots", "4x512", "--threads", "1", "--memory", "1GiB", "--chunk-tokens", "16")
LEAVE_SECONDS = 60.0  # after its last session
# of layers, rows of 512 bytes: some in memory, the rest in files
JOURNALS = {"a": ("--journal-memory", "0", "--journal-dir", "/dev/null/none"), "b": ("--journal-memory", "32KiB")}


class Yard:
    """Nodes by name, such as ``b1``: the second one of the second span. Nodes of the first span can keep no journal,
    so that what follows them is fed from the client's tokens; those of the second one spill most of it."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        spans: dict[str, tuple[int, int]],
        more_options: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.model = model
        self._more_options = more_options or {}  # by name; they win
        self._folder = folder
        self.spans = spans
        self._nodes: dict[str, NodeProcess] = {}
        self.labels: dict[str, str] = {}  # public names, another one for each start
        self._starts = 0
        self._leaving: list[str] = []
        self._first_address = ""
        self.addresses: dict[str, str] = {}  # of nodes that are known to be there

    def start(self) -> None:
        """All at once; returns when every one is ready."""
        for name in self.spans:
            self._nodes[name] = self._process(name)
            if not self._first_address:
                self._first_address = self._nodes[name].wait_for(ADDRESS)[1]
        for name in self.spans:
            self._nodes[name].wait_for(READY)

    @property
    def address(self) -> str:
        """Of a node that lives."""
        alive = [address for name, address in self.addresses.items() if self._nodes[name].process.poll() is None]
        return alive[0] if alive else self._first_address

    def _process(self, name: str) -> NodeProcess:
        self._starts += 1
        label = self.labels[name] = f"{name}.{self._starts}"
        first, last = self.spans[name]
        peers = ["--initial-peers", self.address] if self._first_address else ["--new-swarm"]
        fixed = [
            "--model",
            str(self.model),
            "--layers",
            f"{first}:{last}",
            "--listen",
            "127.0.0.1:0",
            "--public-name",
            label,
        ]
        key = ["--identity", str(self._folder / f"{label}.key")]
        journals = JOURNALS.get(name[0], ())
        journals = journals if "--journal-dir" in journals else (*journals, "--journal-dir", str(self.journal_folder))
        log = self._folder / f"{label}.log"
        more = self._more_options.get(name, ())
        return NodeProcess([*fixed, *key, *journals, *OPTIONS, *more, *peers], log)

    def journal_bytes(self, name: str) -> int:
        """Of memory, when nothing is kept."""
        return 32 << 10 if name[0] == "b" else 0

    @property
    def journal_folder(self) -> Path:
        return self._folder / "journals"

    def __getitem__(self, name: str) -> NodeProcess:
        return self._nodes[name]

    def kill(self, name: str) -> None:
        """As a power cut would: the node, its engine and its network."""
        self.signal(name, signal.SIGKILL)
        self._nodes[name].process.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the node and its children."""
        process = psutil.Process(self._nodes[name].process.pid)
        for member in [process, *process.children(recursive=True)]:
            with suppress(ProcessLookupError):  # it may have followed its parent already
                os.kill(member.pid, number)

    def drain(self, name: str) -> None:
        """Asks the node to leave. Before the dead are revived it must be gone: nobody needs it any more then."""
        self._leaving.append(name)
        os.kill(self._nodes[name].process.pid, signal.SIGTERM)

    def has_left(self, name: str) -> bool:
        return self._nodes[name].process.poll() == 0

    def kill_engine(self, name: str) -> None:
        os.kill(self.engine(name).pid, signal.SIGKILL)

    def engine(self, name: str) -> psutil.Process:
        children = psutil.Process(self._nodes[name].process.pid).children()
        return next(child for child in children if child.name() != "p2pd")

    def revive(self) -> None:
        """Starts the dead again, as new peers."""
        while self._leaving:
            self._nodes[self._leaving.pop()].process.wait(LEAVE_SECONDS)
        dead = [name for name, node in self._nodes.items() if node.process.poll() is not None]
        for name in dead:
            self._nodes[name].join()
            self.addresses.pop(name, None)
        for name in dead:
            self._nodes[name] = self._process(name)
        for name in dead:
            self._nodes[name].wait_for(READY)

    def children(self) -> dict[str, int]:
        """How many processes each node owns."""
        return {name: len(psutil.Process(node.process.pid).children()) for name, node in self._nodes.items()}

    def journal_files(self) -> int:
        """Unnamed files that the nodes hold open."""
        folder = str(self.journal_folder)
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
    model: Path,
    folder: Path,
    spans: dict[str, tuple[int, int]],
    more_options: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Yard]:
    made = Yard(model, folder, spans, more_options)
    try:
        made.start()
        yield made
    finally:
        made.stop()

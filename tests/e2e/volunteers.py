"""Nodes that start with an empty disk, each with a server of its own, so that what it fetches can be counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.range_server import RangeServer
from shim.types import ContextSpec
from swarm.artifact.catalog import GLM_TINY, KNOWN, find_model
from swarm.local_swarm import NodeProcess
from swarm.node.config import ModelOptions
from swarm.node.plan import Planner
from swarm.store.partial_copy import PartialCopy
from swarm.store.pieces import PieceTable

MANIFEST = KNOWN[GLM_TINY].manifest
SLOTS = ContextSpec(2, 512)
CHUNK = 64
THIRDS = ((0, 2), (2, 6), (6, 8))
OPTIONS = ("--slots", f"{SLOTS.slots}x{SLOTS.tokens}", "--chunk-tokens", str(CHUNK), "--listen", "127.0.0.1:0")


def memory_for(first: int, last: int) -> int:
    """What ``--memory`` has to say for these layers of glm-tiny to fit, and nothing larger."""
    options = ModelOptions(Path(), memory_bytes=1 << 40, contexts=(SLOTS,), chunk_tokens=CHUNK)
    return Planner(MANIFEST, options, 1 << 40).place((SLOTS,), "").cost(first, last)


A_THIRD = memory_for(2, 6)  # the largest of THIRDS


def piece_bytes(first: int, last: int) -> int:
    return sum(piece.bytes for piece in PieceTable(MANIFEST).of_span(first, last))


@dataclass
class Volunteer:
    """``folder`` is its data, and survives it."""

    folder: Path
    server: RangeServer
    module: str = "swarm.node.cli"
    processes: list[NodeProcess] = field(default_factory=list)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self, *options: str, prefix: Sequence[str] = ()) -> NodeProcess:
        fixed = ["--model", GLM_TINY, "--source", self.server.url, "--data-dir", str(self.data)]
        fixed += ["--identity", str(self.folder / "node.key"), "--disk-reserve", "0", *OPTIONS]
        log = self.folder / f"node{len(self.processes)}.log"
        self.processes.append(NodeProcess([*fixed, *options], log, prefix=prefix, module=self.module))
        return self.processes[-1]

    def held_bytes(self) -> int:
        """Durable ones."""
        if not self.data.is_dir():
            return 0
        copy = PartialCopy.look(self.data, MANIFEST)
        try:
            return copy.held_bytes(copy.table.of_file(0))
        finally:
            copy.close()


def span_of(node: NodeProcess) -> tuple[int, int]:
    """Waits until it serves."""
    ready = node.wait_for(r"(?m)^ready: serving layers (\d+):(\d+)")
    return int(ready[1]), int(ready[2])


@contextmanager
def volunteers(
    folder: Path, count: int, rates: Sequence[int | None] = (), *, module: str = "swarm.node.cli"
) -> Iterator[list[Volunteer]]:
    """``rates`` are bytes per second of each connection to their servers, ``module`` what they run."""
    source = find_model(GLM_TINY).path.parent
    made: list[Volunteer] = []
    with ExitStack() as stack:
        for number in range(count):
            own = folder / f"volunteer{number}"
            own.mkdir()
            rate = rates[number] if rates else None
            made.append(Volunteer(own, stack.enter_context(RangeServer(source, bytes_per_second=rate)), module))
        try:
            yield made
        finally:
            processes = [process for volunteer in made for process in volunteer.processes]
            for process in processes:
                process.stop()
            for process in processes:
                process.join()

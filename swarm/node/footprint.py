"""What a running node takes, read from /proc, beside what its plan said.

The weights are the artifact's files, mapped: they count as the engine reports them. The page cache holds them, so their
pages are left out where processes are looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shim.types import EngineInfo
from swarm.artifact.memory import SpanMemory, format_bytes

logger = logging.getLogger(__name__)

FAR_OFF = 0.05  # share of what was measured
_KIB = 1024


@dataclass(frozen=True)
class ProcessMemory:
    """Of one process: private pages, and by path the pages of mapped files that are in memory, in bytes."""

    anonymous_bytes: int
    files: tuple[tuple[str, int], ...] = ()


def process_memory(pid: int, proc: Path = Path("/proc")) -> ProcessMemory:
    """Raises OSError when the process is gone, or where there is no /proc."""
    anonymous = 0
    files: dict[str, int] = {}
    path = ""
    with (proc / str(pid) / "smaps").open(errors="replace") as lines:
        for line in lines:
            words = line.split(maxsplit=5)
            if not words[0].endswith(":"):  # the head of a mapping
                path = words[5].strip() if len(words) == 6 and words[5].startswith("/") else ""
            elif words[0] == "Anonymous:":  # of a mapped file, too: what was written to
                anonymous += int(words[1]) * _KIB
                if path:
                    files[path] = files.get(path, 0) - int(words[1]) * _KIB
            elif words[0] == "Rss:" and path:
                files[path] = files.get(path, 0) + int(words[1]) * _KIB
    return ProcessMemory(anonymous, tuple((name, max(0, size)) for name, size in files.items()))


def together(processes: Iterable[ProcessMemory], weights: frozenset[str]) -> int:
    """Bytes of all processes, the files of ``weights`` left out. Of a file that several map, mostly a library, the
    largest share counts: they map the same pages."""
    total = 0
    files: dict[str, int] = {}
    for process in processes:
        total += process.anonymous_bytes
        for path, size in process.files:
            files[path] = max(size, files.get(path, 0))
    return total + sum(size for path, size in files.items() if path not in weights)


def beside_the_span(
    processes: Sequence[int], info: EngineInfo, weights: frozenset[str], proc: Path = Path("/proc")
) -> int | None:
    """Bytes that node, libp2p daemon and worker take, without the engine's buffers. To be asked when the span is loaded
    and nothing was computed: the KV cache was written to then, the graph's buffers were not. None where it can't be
    read."""
    try:
        found = [process_memory(pid, proc) for pid in processes]
    except OSError:
        return None
    return max(0, together(found, weights) - info.kv_bytes)


@dataclass(frozen=True)
class Footprint:
    """Planned and taken, in bytes: what the engine reserves, and what the processes beside it take."""

    planned: SpanMemory
    info: EngineInfo
    own_planned_bytes: int
    own_bytes: int

    @property
    def planned_bytes(self) -> int:
        return self.planned.engine_bytes + self.planned.journal_bytes + self.own_planned_bytes

    @property
    def taken_bytes(self) -> int:
        """Journals count as planned: they are filled while serving."""
        info = self.info
        engine = info.weights_bytes + info.kv_bytes + info.compute_bytes + info.output_bytes
        return engine + self.planned.journal_bytes + self.own_bytes

    @property
    def off(self) -> float:
        """How far the plan is above what is taken, as a share of that; negative when it is below."""
        return self.planned_bytes / max(self.taken_bytes, 1) - 1

    @property
    def is_far_off(self) -> bool:
        return abs(self.off) > FAR_OFF

    def __str__(self) -> str:
        planned, info = self.planned, self.info
        parts = (
            ("weights", planned.weights_bytes, info.weights_bytes),
            ("KV", planned.kv_bytes, info.kv_bytes),
            ("compute", planned.compute_bytes, info.compute_bytes),
            ("output", planned.output_bytes, info.output_bytes),
            ("node", self.own_planned_bytes, self.own_bytes),
        )
        text = ", ".join(f"{name} {format_bytes(a)} -> {format_bytes(b)}" for name, a, b in parts if a or b)
        total = f"{format_bytes(self.planned_bytes)} -> {format_bytes(self.taken_bytes)}"
        return f"memory, planned -> taken: {total} ({self.off:+.1%}): {text}"

    def log(self) -> None:
        logger.info("%s", self)
        if self.is_far_off:
            logger.warning(
                "the memory sum was %+.1f %% off (%s planned, %s taken); keep more free, or tell --memory",
                100 * self.off,
                format_bytes(self.planned_bytes),
                format_bytes(self.taken_bytes),
            )

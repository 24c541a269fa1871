"""Engine calls as a node wrote them down: one line of JSON each, in the order they were handed over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from shim.types import StepBatch


@dataclass(frozen=True)
class Part:
    """The rows of one session in a call: ``count`` positions from ``start`` on."""

    session: str  # its id, hexadecimal
    start: int
    count: int


@dataclass(frozen=True)
class Call:
    """``tiled``: a prefill chunk."""

    tiled: bool
    parts: tuple[Part, ...]

    @staticmethod
    def of(sessions: Sequence[bytes], batch: StepBatch) -> Call:
        """``sessions`` in the order of their rows; each has a slot of its own."""
        edges = [0, *(np.flatnonzero(np.diff(batch.slot)) + 1).tolist(), len(batch.slot)]
        parts = [
            Part(session.hex(), int(batch.position[first]), last - first)
            for session, (first, last) in zip(sessions, pairwise(edges), strict=True)
        ]
        return Call(batch.tiled, tuple(parts))

    @property
    def rows(self) -> int:
        return sum(part.count for part in self.parts)

    def line(self) -> str:
        return json.dumps([self.tiled, [[part.session, part.start, part.count] for part in self.parts]]) + "\n"

    @staticmethod
    def read(line: str) -> Call:
        tiled, parts = json.loads(line)
        return Call(tiled, tuple(Part(*part) for part in parts))


def log_path(identity: Path) -> Path:
    """Of the node with this identity file."""
    return identity.with_suffix(".calls")


def calls_of(path: Path, sessions: frozenset[str]) -> list[Call]:
    """The calls of these sessions, who shared none with others."""
    calls = [Call.read(line) for line in path.read_text().splitlines()]
    return [call for call in calls if all(part.session in sessions for part in call.parts)]

"""What must be computed again, and in which shapes, to bring a hop to a position.

A prefill chunk has its bits only as a whole; decode rows have theirs in any grouping. So a chunk is repeated whole even
when only a part of it still counts (the step after it cuts it, as it did the first time), and decode rows are cut and
joined at will. Used by hops for what they computed, and by clients for what they sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Piece(Generic[T]):
    """One step: positions [start, start + count). ``content`` is the caller's."""

    start: int
    count: int
    chunk: bool
    content: T

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Slice(Generic[T]):
    """Rows [first, last) of a piece's content."""

    content: T
    first: int
    last: int


@dataclass(frozen=True)
class Replay(Generic[T]):
    """One step to be sent again; its rows are those of ``slices``, one after the other."""

    start: int
    count: int
    chunk: bool
    slices: tuple[Slice[T], ...]


class Track(Generic[T]):
    """Steps in the order they were computed. A step replaces what lies at or above its start: pieces wholly there are
    dropped, one that reaches into it stays whole and counts up to that start."""

    def __init__(self) -> None:
        self._pieces: list[Piece[T]] = []
        self._end = 0

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def first(self) -> int:
        """Where the track begins; at its end when it is empty."""
        return self._pieces[0].start if self._pieces else self._end

    @property
    def end(self) -> int:
        """The position it leads to."""
        return self._end

    def covers(self, first: int) -> bool:
        """Whether everything from ``first`` to the end can be sent again."""
        return first >= self._end or self.first <= first

    def append(self, start: int, count: int, *, chunk: bool, content: T) -> list[Piece[T]]:
        """Returns what it replaces. A step beyond the end begins a new track."""
        dropped = self.truncate(start) if start <= self._end else self.clear()
        self._pieces.append(Piece(start, count, chunk, content))
        self._end = start + count
        return dropped

    def copy(self) -> Track[T]:
        """The contents are shared."""
        other: Track[T] = Track()
        other._pieces, other._end = list(self._pieces), self._end
        return other

    def counted(self) -> Iterator[Slice[T]]:
        """What counts, in order: one slice for each position up to the end, from ``first`` on."""
        for piece, counts_to in self._counted(0):
            yield Slice(piece.content, 0, counts_to - piece.start)

    def truncate(self, position: int) -> list[Piece[T]]:
        """Forgets what lies at or above ``position`` and returns the pieces that are dropped, the latest first."""
        dropped = []
        while self._pieces and self._pieces[-1].start >= position:
            dropped.append(self._pieces.pop())
        self._end = min(self._end, position)
        return dropped

    def clear(self) -> list[Piece[T]]:
        dropped, self._pieces = self._pieces[::-1], []
        return dropped

    def replay(self, first: int, most_rows: int) -> Iterator[Replay[T]]:
        """The steps that lead from ``first`` to the end, decode rows in calls of at most ``most_rows``. A snapshot: the
        track may change while it is used."""
        joined: list[Slice[T]] = []
        start = rows = 0
        for piece, counts_to in self._counted(first):
            if piece.chunk:
                if joined:
                    yield Replay(start, rows, False, tuple(joined))
                    joined, rows = [], 0
                yield Replay(piece.start, piece.count, True, (Slice(piece.content, 0, piece.count),))
                continue
            at = max(piece.start, first)
            while at < counts_to:
                if not joined:
                    start = at
                upto = min(counts_to, at + most_rows - rows)
                joined.append(Slice(piece.content, at - piece.start, upto - piece.start))
                rows += upto - at
                at = upto
                if rows == most_rows:
                    yield Replay(start, rows, False, tuple(joined))
                    joined, rows = [], 0
        if joined:
            yield Replay(start, rows, False, tuple(joined))

    def _counted(self, first: int) -> list[tuple[Piece[T], int]]:
        """Pieces that matter beyond ``first``, each with the position up to which it counts."""
        counts_to = [*(piece.start for piece in self._pieces), self._end][1:]
        return [(piece, end) for piece, end in zip(self._pieces, counts_to, strict=True) if end > first]


@dataclass
class Held:
    """What a successor holds while steps are replayed through a hop: tells which rows it lacks.

    From the first step that it lacks it needs all: a chunk sent whole has thrown it back to the chunk's start.
    """

    position: int

    def lacks(self, start: int, count: int, *, chunk: bool) -> int | None:
        """The first row of a step to be sent on; None when the successor needs none. Assumes that the caller sends."""
        if start + count <= self.position:
            return None
        first = 0 if chunk else max(0, self.position - start)
        self.position = 0
        return first

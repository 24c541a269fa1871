"""Neighbouring pieces that are asked for at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swarm.store.pieces import Piece

MAX_REQUEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Request:
    """Pieces of one file that follow each other."""

    pieces: tuple[Piece, ...]

    @property
    def file(self) -> int:
        return self.pieces[0].file

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        return self.pieces[-1].stop

    @property
    def bytes(self) -> int:
        return self.stop - self.start


def coalesce(pieces: Iterable[Piece], max_bytes: int = MAX_REQUEST_BYTES) -> Iterator[Request]:
    """Requests for exactly these pieces, in their order; none is longer than ``max_bytes``, unless a piece is."""
    group: list[Piece] = []
    for piece in pieces:
        if group and not (_follows(group[-1], piece) and piece.stop - group[0].start <= max_bytes):
            yield Request(tuple(group))
            group = []
        group.append(piece)
    if group:
        yield Request(tuple(group))


def _follows(before: Piece, piece: Piece) -> bool:
    return before.file == piece.file and before.stop == piece.start

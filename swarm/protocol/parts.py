"""Byte strings that travel in several frames: artifact pieces and logits rows."""

from __future__ import annotations

from collections.abc import Iterator

from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.limits import PART_BYTES
from swarm.protocol.wire_errors import WireError


def artifact_parts(piece: bytes, offset: int = 0) -> Iterator[pb.ArtifactPart]:
    """What answers an ArtifactRequest for ``piece`` from ``offset`` on; at least one part."""
    total = len(piece)
    for at, data in _cut(piece, offset):
        yield pb.ArtifactPart(offset=at, total_bytes=total, data=data)


def row_parts(position: int, row: bytes) -> Iterator[pb.Row]:
    """What answers a RowRequest: ``row`` is f32 little-endian."""
    for at, data in _cut(row, 0):
        yield pb.Row(position=position, offset_bytes=at, total_bytes=len(row), data=data)


def _cut(whole: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    if not 0 <= offset <= len(whole):
        raise WireError(pb.MALFORMED, f"offset {offset} is beyond the end at {len(whole)}")
    for at in range(offset, max(len(whole), offset + 1), PART_BYTES):
        yield at, whole[at : at + PART_BYTES]


class PartJoiner:
    """Collects parts that must follow each other from ``offset`` on and agree on the total; at most ``max_bytes``."""

    def __init__(self, max_bytes: int, offset: int = 0) -> None:
        self._max_bytes = max_bytes
        self._offset = offset
        self._total: int | None = None
        self._data = bytearray()

    @property
    def offset(self) -> int:
        """Where the next part starts."""
        return self._offset

    @property
    def total_bytes(self) -> int | None:
        """Size of the whole as the peer says; None before the first part."""
        return self._total

    def add(self, part: pb.ArtifactPart | pb.Row) -> bytes | None:
        """The collected bytes when ``part`` was the last, else None."""
        offset = part.offset if isinstance(part, pb.ArtifactPart) else part.offset_bytes
        if part.total_bytes > self._max_bytes:
            raise WireError(pb.TOO_LARGE, f"{part.total_bytes} bytes are offered, at most {self._max_bytes} are taken")
        if offset != self._offset or self._total not in (None, part.total_bytes):
            raise WireError(pb.MALFORMED, f"a part at {offset} of {part.total_bytes} bytes does not follow the last")
        self._total = part.total_bytes
        self._data += part.data
        self._offset += len(part.data)
        return bytes(self._data) if self._offset == self._total else None

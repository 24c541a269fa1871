"""Reads what a machine holds of a model, and finds the pieces that are not what they were, or should be.

A piece has the digest it had when it came: a byte that has changed on the disk since is found in its piece. Whether
what came was right, a digest list tells tensor by tensor; without one, only the SHA-256 of a file that is whole.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

from swarm.artifact.local_copy import check_copy
from swarm.artifact.progress import Reading
from swarm.errors import ArtifactError, StoreError
from swarm.store.partial_copy import PartialCopy
from swarm.store.pieces import Piece, piece_digest


@dataclass(frozen=True)
class FileFindings:
    """``changed`` pieces differ from what came; all pieces of tensors in ``wrong`` never were the model's. ``foreign``:
    the file is whole and not the model's, though nothing tells where."""

    file: int
    held: tuple[Piece, ...]
    changed: tuple[Piece, ...]
    wrong: tuple[str, ...]
    foreign: bool = False

    @property
    def is_right(self) -> bool:
        return not (self.changed or self.wrong or self.foreign)

    @property
    def to_fetch(self) -> tuple[Piece, ...]:
        """The pieces to fetch again."""
        if self.foreign:
            return self.held
        return tuple(
            piece for piece in self.held if piece in self.changed or (piece.tensor and piece.tensor in self.wrong)
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of tensors with wrong bytes."""
        return tuple(dict.fromkeys([*(piece.tensor for piece in self.changed if piece.tensor), *self.wrong]))


def held_pieces(copy: PartialCopy, file: int) -> tuple[Piece, ...]:
    return tuple(piece for piece in copy.table.of_file(file) if copy.has(piece))


def check_held(copy: PartialCopy, digests: Mapping[str, str] | None, reading: Reading) -> Iterator[FileFindings]:
    """File by file; those of which nothing is here are left out."""
    for file in range(copy.table.n_files):
        held = held_pieces(copy, file)
        if held:
            reading.file(f"file {file + 1} of {copy.table.n_files}")
            yield _check_file(copy, file, held, digests, reading)


def headers_differ(copy: PartialCopy) -> str:
    """Why the headers, all of which are here, are not the model's; empty when they are, or some are missing."""
    if copy.missing(copy.table.headers()):
        return ""
    try:
        check_copy(copy.manifest, copy.folder, kept=False)
    except ArtifactError as error:
        return str(error).rpartition("; ")[0]
    return ""


def _check_file(
    copy: PartialCopy, file: int, held: tuple[Piece, ...], digests: Mapping[str, str] | None, reading: Reading
) -> FileFindings:
    whole = sha256()
    changed = []
    for piece in held:
        data = _read(copy, piece)
        if len(data) < piece.bytes or piece_digest(piece, data) != copy.digest(piece):
            changed.append(piece)
        whole.update(data)
        reading.bytes(piece.bytes)
    wrong = _wrong(copy, held, digests or {})
    is_foreign = (
        copy.whole(file) and not changed and not wrong and whole.hexdigest() != copy.manifest.files[file].sha256
    )
    return FileFindings(file, held, tuple(changed), wrong, is_foreign)


def _read(copy: PartialCopy, piece: Piece) -> bytes:
    """Nothing, where the disk has lost it."""
    try:
        return copy.read(piece)
    except StoreError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO:
            return b""
        raise


def _wrong(copy: PartialCopy, held: tuple[Piece, ...], digests: Mapping[str, str]) -> tuple[str, ...]:
    names = dict.fromkeys(piece.tensor for piece in held if piece.tensor in digests)
    return tuple(name for name in names if copy.tensor_digest(name) not in (None, digests[name]))

"""One file of a partial copy: full size, with holes, and beside it which of its pieces are durable.

Two rules keep the state true whenever the process or the machine dies. A piece is marked after its bytes are on the
disk, and its mark is gone from the disk before its bytes change. A file that shares its bytes with another name, by a
hard or symbolic link, is replaced by one of its own before the first write.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import RLock

from swarm.errors import SourceError, StoreError
from swarm.store import holes
from swarm.store.piece_state import (
    SUFFIX,
    DamagedState,
    ForeignState,
    read_state,
    remove_unfinished,
    sync_folder,
    write_state,
)
from swarm.store.pieces import DIGEST_BYTES, Piece, PieceTable, piece_digest
from swarm.store.store_errors import ELSEWHERE, store_errors

_NONE = bytes(DIGEST_BYTES)
_NEW = ".new"


class PartFile:
    """``unknown``: it lies there in full size, but not by this program, so nothing of it counts before it is adopted,
    and it is not written. ``remarks`` are for the user."""

    def __init__(self, folder: Path, table: PieceTable, number: int) -> None:
        """Raises ``StoreError`` for what can't be this file."""
        entry = table.manifest.files[number]
        self.path = path = folder / entry.name
        self.remarks: list[str] = []
        self.unknown = False
        self._size = entry.size_bytes
        self._artifact_id = table.manifest.artifact_id
        self._pieces = partial(table.of_file, number)  # made when they are needed, which is seldom
        self._state_path = path.with_name(path.name + SUFFIX)
        self._new_path = path.with_name(path.name + _NEW)
        self._handle = -1
        self._pending: dict[int, bytes] = {}  # written, but not yet durable
        self._syncing: dict[int, bytes] = {}  # about to be
        self._writing = RLock()  # guards the handle, the two above and the bytes
        self._marking = RLock()  # guards the state; taken before the other
        self._digests = self._read(table.n_pieces(number))
        self._drop_cut_off()

    # --- what is here

    def digest(self, piece: Piece) -> bytes | None:
        """Of a durable piece."""
        at = piece.index * DIGEST_BYTES
        digest = bytes(self._digests[at : at + DIGEST_BYTES])
        return None if digest == _NONE else digest

    def is_linked(self) -> bool:
        """Whether its bytes are another name's too."""
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISLNK(status.st_mode) or status.st_nlink > 1

    def read(self, piece: Piece) -> bytes:
        """What lies there, right or not; shorter than the piece where the file ends early."""
        data = bytearray()
        with store_errors(self.path), self.path.open("rb", buffering=0) as stream:
            while len(data) < piece.bytes:
                block = os.pread(stream.fileno(), piece.bytes - len(data), piece.start + len(data))
                if not block:
                    break
                data += block
        return bytes(data)

    def taken_bytes(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Room that [start, stop) of the file take: blocks that are shared with what lies beside are not counted."""
        try:
            with store_errors(self.path), self.path.open("rb", buffering=0) as stream:
                status = os.fstat(stream.fileno())
                whole = (holes.whole_blocks(start, stop, status.st_blksize, status.st_size) for start, stop in ranges)
                return sum(holes.data_bytes(stream.fileno(), start, stop) for start, stop in whole)
        except StoreError:
            if not os.path.lexists(self.path):
                return 0
            raise

    # --- changing it

    def clean(self) -> None:
        """Of what a process left that was killed."""
        with store_errors(self.path):
            self._new_path.unlink(missing_ok=True)
            remove_unfinished(self._state_path)

    def write(self, piece: Piece, data: bytes | bytearray | memoryview) -> None:
        assert len(data) == piece.bytes, f"{len(data)} bytes for a piece of {piece.bytes}"
        digest = piece_digest(piece, data)
        self._get_ready()
        while not self._written(piece, data, digest):
            self.forget([piece])  # waits for a commit that is about to mark it

    def _written(self, piece: Piece, data: bytes | bytearray | memoryview, digest: bytes) -> bool:
        """False when the piece is marked, or is going to be."""
        with self._writing, store_errors(self.path):
            if self.digest(piece) is not None or piece.index in self._syncing:
                return False
            handle, view, at = self._own_handle(), memoryview(data), piece.start
            while view:  # a call writes less when a signal comes or the disk fills
                written = os.pwrite(handle, view, at)
                view, at = view[written:], at + written
            self._pending[piece.index] = digest
            return True

    def commit(self) -> int:
        """Makes what was written durable, then marks it. Returns how many pieces that were. When it raises, they count
        as never written: after a failed sync nobody knows what the disk has."""
        with self._marking, store_errors(self.path):
            with self._writing:
                self._syncing, self._pending = self._pending, {}
                if not self._syncing:
                    return 0
                handle = os.dup(self._handle)
            try:
                os.fdatasync(handle)
                self._check_named(handle)
                self._mark(self._syncing)
                return len(self._syncing)
            finally:
                os.close(handle)
                self._syncing = {}

    def adopt(self, pieces: Sequence[Piece]) -> None:
        """Takes the bytes that lie there for these pieces', whatever they are."""
        with self._marking, store_errors(self.path):
            found: dict[int, bytes] = {}
            for piece in pieces:
                data = self.read(piece)
                if len(data) < piece.bytes:
                    raise StoreError(f"{self.path}: it ends early; delete it, and it is fetched again")
                found[piece.index] = piece_digest(piece, data)
            with self.path.open("rb", buffering=0) as stream:
                os.fsync(stream.fileno())
            self.unknown = False
            self._mark(found)

    def forget(self, pieces: Sequence[Piece]) -> None:
        """The pieces are not here any more, durably so; their bytes stay until they are written over or freed."""
        with self._marking:
            with self._writing:
                for piece in pieces:
                    self._pending.pop(piece.index, None)
            gone = {piece.index: _NONE for piece in pieces if self.digest(piece) is not None}
            if gone:
                with store_errors(self.path):
                    self._mark(gone)

    def free(self, pieces: Sequence[Piece]) -> int:
        """Forgets the pieces and gives their room back; returns the bytes. A linked file has no room of its own."""
        if self.unknown or self.is_linked() or not os.path.lexists(self.path):
            return 0
        with self._marking, self._writing, store_errors(self.path):
            handle = self._own_handle()
            holes.punch(handle, self._size, self._size + 1)  # behind the end, to learn whether it can be done
            self.forget(pieces)
            before = os.fstat(handle).st_blocks
            for start, stop in ranges_of(pieces):
                holes.punch(handle, start, stop)
            os.fsync(handle)
            return max(0, before - os.fstat(handle).st_blocks) * 512

    def link(self, source: Path) -> None:
        """Puts a hard link to ``source`` here, of which nothing counts until it is adopted. Raises ``OSError`` where
        the file system can't; ``StoreError`` where something is here already that a link would replace."""
        with self._marking, self._writing:
            if self.unknown or any(self._digests) or self._pending:
                raise StoreError(f"{self.path}: parts of it are here already; {ELSEWHERE}")
            if source.stat().st_size != self._size:
                raise SourceError(f"{source}: it has not the {self._size} bytes that it should; choose another source")
            self._new_path.unlink(missing_ok=True)
            self._mark({})  # before the file: without a state it would be anybody's
            os.link(os.path.realpath(source), self._new_path)  # link(2) follows no links: one of its own would be made
            self._replace()

    def close(self) -> None:
        with self._writing:
            if self._handle >= 0:
                os.close(self._handle)
            self._handle = -1

    # --- how

    def _read(self, n_pieces: int) -> bytearray:
        size = self._present_size()
        digests = self._marks(n_pieces)
        self.unknown = digests is None and size is not None
        if size is not None and (size > self._size or (self.unknown and size < self._size)):
            raise StoreError(
                f"{self.path}: not put there by this program, or changed since: it has {size} bytes and not "
                f"{self._size}; move it away, or {ELSEWHERE}"
            )
        if size is None and digests is not None and any(digests):
            self.remarks.append(f"{self.path.name}: gone; what was here of it counts as missing")
            digests = None
        return digests if digests is not None else bytearray(n_pieces * DIGEST_BYTES)

    def _marks(self, n_pieces: int) -> bytearray | None:
        """What the state says; None without one."""
        try:
            with store_errors(self._state_path):
                return read_state(self._state_path, self._artifact_id, n_pieces)
        except DamagedState:
            self.remarks.append(f"{self._state_path.name}: damaged; what was here of the file counts as missing")
            return bytearray(n_pieces * DIGEST_BYTES)
        except ForeignState as error:
            raise StoreError(f"{self._state_path}: {error}; {ELSEWHERE}") from error
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def _drop_cut_off(self) -> None:
        """Of a file that somebody has cut off, forgets the pieces beyond its end, in memory: opened again it is found
        cut off again."""
        size = self._present_size()
        if size is None or size >= self._size:
            return
        lost = [piece for piece in self._pieces() if piece.stop > size and self.digest(piece) is not None]
        for piece in lost:
            self._digests[piece.index * DIGEST_BYTES : (piece.index + 1) * DIGEST_BYTES] = _NONE
        if lost:
            self.remarks.append(f"{self.path.name}: cut off at byte {size}; what was behind counts as missing")

    def _present_size(self) -> int | None:
        with store_errors(self.path):
            if not os.path.lexists(self.path):
                return None
            status = self.path.stat()  # of what a link leads to
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"{self.path}: not a regular file; move it away, or {ELSEWHERE}")
            return status.st_size

    def _get_ready(self) -> None:
        """To be written: opening may mark, which is no part of writing a piece."""
        if self._handle < 0:
            with self._marking, self._writing, store_errors(self.path):
                self._own_handle()

    def _own_handle(self) -> int:
        """For writing; of a file whose bytes nobody else has."""
        if self.unknown:
            raise StoreError(f"{self.path}: not put there by this program; move it away, or {ELSEWHERE}")
        if self.is_linked():
            self._break_link()
        if self._handle < 0:
            self._handle = self._opened()
        self._check_named(self._handle)
        return self._handle

    def _check_named(self, handle: int) -> None:
        if not os.fstat(handle).st_nlink:
            raise StoreError(f"{self.path}: deleted while it was in use; start again, and it is fetched again")

    def _opened(self) -> int:
        if not os.path.lexists(self.path):
            self._mark({})  # before the file: without a state it would be anybody's
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            if os.fstat(handle).st_size < self._size:
                self._mark({})  # what was cut off is forgotten before its place is there again
                os.ftruncate(handle, self._size)
                os.fsync(handle)
                sync_folder(self.path.parent)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _own_pieces(self) -> Iterator[Piece]:
        """Durable ones, and those that are going to be."""
        for piece in self._pieces():
            if self.digest(piece) is not None or piece.index in self._pending or piece.index in self._syncing:
                yield piece

    def _break_link(self) -> None:
        """Copies what is this folder's: of a file that was linked for a few layers that is little."""
        self._new_path.unlink(missing_ok=True)
        try:
            with self.path.open("rb", buffering=0) as source, self._new_path.open("xb", buffering=0) as target:
                os.ftruncate(target.fileno(), self._size)
                for start, stop in ranges_of(self._own_pieces()):
                    holes.copy_range(source.fileno(), target.fileno(), start, stop)
                os.fsync(target.fileno())
        except BaseException:
            self._new_path.unlink(missing_ok=True)
            raise
        self._replace()

    def _replace(self) -> None:
        self.close()
        self._new_path.replace(self.path)
        self._new_path.unlink(missing_ok=True)  # stays where both names were one file's already
        sync_folder(self.path.parent)

    def _mark(self, digests: dict[int, bytes]) -> None:
        marked = bytearray(self._digests)
        for index, digest in digests.items():
            marked[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = digest
        write_state(self._state_path, self._artifact_id, marked)
        self._digests = marked


def ranges_of(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Of one file's pieces, neighbours together."""
    ranges: list[tuple[int, int]] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if ranges and ranges[-1][1] == piece.start:
            ranges[-1] = ranges[-1][0], piece.stop
        else:
            ranges.append((piece.start, piece.stop))
    return ranges

"""The parts of an artifact that this machine holds: files with the stock names, sizes and offsets, and holes in them.

What is here is counted in pieces (``swarm.store.pieces``). A piece is written, committed with others, and from then on
it is durable: it has a digest and survives the death of the process or of the machine. The engine opens the files as
it would the whole model's; a span needs the headers of all files and its own tensors' pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType

from swarm.artifact.digest import compute_digest
from swarm.artifact.local_copy import LocalCopy, check_copy, check_digest
from swarm.artifact.local_path import is_folder
from swarm.artifact.manifest import Manifest
from swarm.errors import ArtifactError, SourceError, StoreError
from swarm.store.folder_lock import FolderLock
from swarm.store.part_file import PartFile, ranges_of
from swarm.store.piece_state import SUFFIX, artifact_of
from swarm.store.pieces import Piece, PieceTable, tensor_digest
from swarm.store.room import Need, check_free, check_room
from swarm.store.store_errors import ELSEWHERE, store_errors

OnBytes = Callable[[int], None]
_BLOCK_BYTES = 4096  # what the ends of a range may cost beyond it


class PartialCopy:
    """One artifact's folder. Methods block and may be called from several threads; ``StoreError`` is what the disk can
    cause. ``remarks`` tell the user what was found and not counted."""

    def __init__(self, folder: Path, manifest: Manifest, disk_reserve_bytes: int, lock: FolderLock | None) -> None:
        _check_alone(folder, manifest)
        self.folder = folder
        self.manifest = manifest
        self.table = PieceTable(manifest)
        self._reserve_bytes = disk_reserve_bytes
        self._lock = lock
        self._files = tuple(
            PartFile(folder / entry.name, entry, manifest.artifact_id, self.table.n_pieces(number))
            for number, entry in enumerate(manifest.files)
        )
        for number, file in enumerate(self._files):
            file.drop_cut_off(partial(self.table.of_file, number))

    @classmethod
    def open(cls, folder: Path, manifest: Manifest, *, disk_reserve_bytes: int = 0) -> PartialCopy:
        """To be written, by nobody else meanwhile; makes the folder. ``manifest`` has the files' names. Raises
        ``StoreError`` for a folder that is in use, can't be written, or has something else under these names."""
        with store_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return cls.open_existing(folder, manifest, disk_reserve_bytes=disk_reserve_bytes)

    @classmethod
    def open_existing(cls, folder: Path, manifest: Manifest, *, disk_reserve_bytes: int = 0) -> PartialCopy:
        """``open`` of a folder that has to be there."""
        _check_names(manifest)
        _check_folder(folder)
        lock = FolderLock(folder)
        try:
            copy = cls(folder, manifest, disk_reserve_bytes, lock)
            for file in copy._files:
                file.clean()
            return copy
        except BaseException:
            lock.release()
            raise

    @classmethod
    def look(cls, folder: Path, manifest: Manifest) -> PartialCopy:
        """To be read only: needs no right to write, and is allowed while another process fetches."""
        _check_names(manifest)
        _check_folder(folder)
        return cls(folder, manifest, 0, None)

    def __enter__(self) -> PartialCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """What is written and not committed counts as missing when the folder is opened again."""
        for file in self._files:
            file.close()
        if self._lock is not None:
            self._lock.release()

    # --- what is here

    @property
    def remarks(self) -> tuple[str, ...]:
        return tuple(remark for file in self._files for remark in file.remarks)

    @property
    def unknown(self) -> tuple[int, ...]:
        """Files of the right size that lie there and were not put there by this program: ``adopt_whole`` them, or
        nothing can be written to them."""
        return tuple(number for number, file in enumerate(self._files) if file.unknown)

    def path(self, file: int) -> Path:
        return self._files[file].path

    def has(self, piece: Piece) -> bool:
        """Whether the piece is durable."""
        return self.digest(piece) is not None

    def digest(self, piece: Piece) -> bytes | None:
        """Of a durable piece, as it was when it came."""
        return self._files[piece.file].digest(piece)

    def tensor_digest(self, name: str) -> str | None:
        """In hex; None as long as a piece is missing."""
        digests = [self.digest(piece) for piece in self.table.of_tensor(name)]
        known = [digest for digest in digests if digest is not None]
        return tensor_digest(known) if len(known) == len(digests) else None

    def missing(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces if not self.has(piece))

    def held_bytes(self, pieces: Iterable[Piece]) -> int:
        return sum(piece.bytes for piece in pieces if self.has(piece))

    def whole(self, file: int) -> bool:
        """Whether every piece of the file is durable."""
        return not self.missing(self.table.of_file(file))

    def is_linked(self, file: int) -> bool:
        """Whether the file's bytes are those of another name too, which frees nothing when they are freed here."""
        return self._files[file].is_linked()

    def read(self, piece: Piece) -> bytes:
        """What lies on the disk, right or not; shorter than the piece where the file ends early."""
        return self._files[piece.file].read(piece)

    def taken_bytes(self, pieces: Iterable[Piece]) -> int:
        """Room the pieces take on the disk, durable or left by a process that died; to the block."""
        return sum(self._files[number].taken_bytes(ranges_of(own)) for number, own in _by_file(pieces))

    # --- changing it

    def check_room(self, pieces: Iterable[Piece]) -> None:
        """Whether what is missing of the pieces can be stored and the reserve stays free. Raises ``StoreError``, which
        says how much is missing."""
        missing = self.missing(pieces)
        if not missing:
            return
        needed = sum(stop - start + _BLOCK_BYTES for _, own in _by_file(missing) for start, stop in ranges_of(own))
        largest = max(self.manifest.files[piece.file].size_bytes for piece in missing)
        taken = self.taken_bytes(missing)
        check_room(self.folder, Need(max(0, needed - taken), self._reserve_bytes, largest))

    def write(self, piece: Piece, data: bytes | bytearray | memoryview) -> None:
        """All of a piece. It is not here before ``commit``; one that was here before is not until then either."""
        self._files[piece.file].write(piece, data)

    def commit(self) -> int:
        """Makes durable what was written before the call; returns how many pieces. Raises ``StoreError`` when the disk
        fails, or has less free than the reserve."""
        count = sum(file.commit() for file in self._files)
        if count:
            check_free(self.folder, 0, self._reserve_bytes)
        return count

    def forget(self, pieces: Iterable[Piece]) -> None:
        """The pieces are not here any more; their bytes stay until they are written over or freed."""
        for number, own in _by_file(pieces):
            self._files[number].forget(own)

    def free(self, pieces: Iterable[Piece]) -> int:
        """Forgets the pieces and makes holes of them; returns how many bytes the disk has got back. A linked file is
        left as it is: its bytes are not this folder's alone."""
        return sum(self._files[number].free(own) for number, own in _by_file(pieces))

    def link(self, file: int, source: Path) -> None:
        """Puts a hard link to a whole file here instead of a copy. Nothing of it counts until it is adopted, and it is
        never written: a write makes a copy first. Raises ``OSError`` where the file system can't link."""
        self._files[file].link(source)

    def adopt(self, pieces: Iterable[Piece]) -> None:
        """Reads the pieces and takes them for what they should be: the caller knows, or compares digests next."""
        for number, own in _by_file(pieces):
            self._files[number].adopt(own)

    def adopt_whole(self, file: int, on_bytes: OnBytes = lambda _: None) -> None:
        """Takes a file that was put there by hand, if every byte of it is right; reads it twice. Raises ``StoreError``
        if not, and leaves it as it is."""
        path, entry = self._files[file].path, self.manifest.files[file]
        if compute_digest(path, on_bytes) != entry.sha256:
            raise StoreError(
                f"{path}: not put there by this program, and not a whole file of {self.manifest.name}; move it away, "
                f"or {ELSEWHERE}"
            )
        self.adopt(self.table.of_file(file))

    # --- as a model

    def local_copy(self) -> LocalCopy:
        """The files for the engine; the headers of all must be here. Raises ``SourceError`` when they are not those of
        the manifest, and forgets them then, so that they are fetched again."""
        headers = self.table.headers()
        if missing := self.missing(headers):
            raise StoreError(f"{self.path(missing[0].file)}: its header is not here yet; fetch it first")
        try:
            copy = check_copy(self.manifest, self.folder, kept=False)
        except ArtifactError as error:
            self.forget(headers)
            what = str(error).rpartition("; ")[0]
            raise SourceError(
                f"headers from this source are not {self.manifest.name}'s ({what}); choose another"
            ) from error
        return replace(copy, unread=())

    def check_whole(self, file: int, on_bytes: OnBytes = lambda _: None) -> None:
        """Compares the SHA-256 of a complete file with the manifest's. Raises ``ArtifactMismatch``."""
        path = self._files[file].path
        check_digest(path, compute_digest(path, on_bytes), self.manifest.files[file].sha256)


def _by_file(pieces: Iterable[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    for number, own in groupby(sorted(pieces, key=lambda piece: (piece.file, piece.index)), lambda piece: piece.file):
        yield number, list(own)


def _check_folder(folder: Path) -> None:
    if not is_folder(folder):
        raise StoreError(f"{folder}: no such folder; name the one that the model was fetched into")


def _check_alone(folder: Path, manifest: Manifest) -> None:
    own = {file.name + SUFFIX for file in manifest.files}
    with store_errors(folder):
        others = [path for path in folder.glob(f"*{SUFFIX}") if path.name not in own and path.is_file()]
        for path in others:
            artifact_id = artifact_of(path)
            if artifact_id is not None:
                what = "of another model" if artifact_id != manifest.artifact_id else "of this model by another name"
                raise StoreError(f"{path}: {what}, artifact {artifact_id[:12]}; {ELSEWHERE}")


def _check_names(manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    plain = all(name and name == Path(name).name and not name.startswith(".") for name in names)
    if not plain or len(set(names)) < len(names):
        raise StoreError(f"{manifest.name}: its files have no names that could be used; give a manifest with names")

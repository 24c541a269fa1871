"""A folder with the model's files on this machine, which are only ever read."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path

from swarm.artifact.local_path import exists
from swarm.artifact.manifest import Manifest
from swarm.errors import SourceError, StoreError
from swarm.store.folder_lock import FolderLock
from swarm.store.in_thread import in_thread
from swarm.store.partial_copy import PartialCopy
from swarm.store.piece_state import SUFFIX

_BLOCK = 1 << 20


class FolderSource:
    """``subfolder`` is looked into when the files are not in ``folder`` itself: the hub keeps one."""

    def __init__(self, folder: Path, subfolder: str = "") -> None:
        self.folder = folder
        self._places = (folder, folder / subfolder) if subfolder else (folder,)
        self._descriptors: tuple[int, ...] = ()
        self._partial: dict[int, PartialCopy] = {}
        self._lock: FolderLock | None = None
        self._paths: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of the files, in the manifest's order, once it is open."""
        return self._paths

    async def open(self, manifest: Manifest) -> None:
        if self._descriptors:
            return
        descriptors: list[int] = []
        try:
            paths = [self._find(file.name) for file in manifest.files]
            for path, file in zip(paths, manifest.files, strict=True):
                descriptors.append(_open(path))
                _check_size(path, descriptors[-1], file.size_bytes, manifest.name)
        except BaseException:
            _close(descriptors)
            raise
        self._descriptors, self._paths = tuple(descriptors), tuple(paths)
        self._lock = _lock(paths)
        self._partial = await in_thread(_partial, manifest, paths)

    def is_whole(self, file: int) -> bool:
        """Whether it has all of the file, by what another fetch has noted there if it made the file."""
        return file not in self._partial or self._partial[file].whole(file)

    async def read(self, file: int, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        self._check_held(file, start, stop)
        at = start
        while at < stop:
            data = await in_thread(self._pread, file, min(_BLOCK, stop - at), at)
            at += len(data)
            yield data

    async def close(self) -> None:
        descriptors, self._descriptors = self._descriptors, ()
        _close(descriptors)
        if self._lock is not None:
            self._lock.release()

    def _pread(self, file: int, n_bytes: int, at: int) -> bytes:
        path = self._paths[file]
        try:
            data = os.pread(self._descriptors[file], n_bytes, at)
        except OSError as error:
            raise SourceError(f"{path}: can't be read ({error.strerror}); choose another --source") from error
        if not data:
            raise SourceError(f"{path}: has become shorter, it ends at byte {at}; fetch again when it is complete")
        return data

    def _check_held(self, file: int, start: int, stop: int) -> None:
        """A hole reads as zeros: they must not be taken for weights."""
        copy = self._partial.get(file)
        if copy is None:
            return
        for piece in copy.table.of_file(file):
            if piece.start < stop and start < piece.stop and not copy.has(piece):
                raise SourceError(
                    f"{self._paths[file]}: is itself only a part: {piece.tensor or 'the header'} is not in it; choose "
                    "another --source"
                )

    def _find(self, name: str) -> Path:
        """Where it should be, when it is in no place."""
        return next((place / name for place in self._places if (place / name).is_file()), self._places[0] / name)


def _lock(paths: list[Path]) -> FolderLock | None:
    """So that no part is freed while it is copied. A node or a fetch that has the folder keeps others out too."""
    folder = paths[0].parent
    if not any(exists(path.with_name(path.name + SUFFIX)) for path in paths) or not os.access(folder, os.W_OK):
        return None
    try:
        return FolderLock(folder, shared=True)
    except StoreError:
        return None


def _partial(manifest: Manifest, paths: list[Path]) -> dict[int, PartialCopy]:
    """Of the files that were fetched, what is there of them."""
    fetched = [file for file, path in enumerate(paths) if exists(path.with_name(path.name + SUFFIX))]
    if not fetched:
        return {}
    copy = PartialCopy.look(paths[fetched[0]].parent, manifest)
    return {file: copy for file in fetched if file not in copy.unknown}


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SourceError(
            f"{path}: can't be read ({error.strerror}); --source must name the folder with all files of the model"
        ) from error


def _check_size(path: Path, descriptor: int, expected: int, model: str) -> None:
    size = os.fstat(descriptor).st_size
    if size != expected:
        raise SourceError(
            f"{path}: has {size} bytes where the file of {model} has {expected}; choose a --source with that model"
        )


def _close(descriptors: list[int] | tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

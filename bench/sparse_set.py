"""Writes model files of which only some tensors have data; the rest are holes that read as zeros and take no disk.

A file gets its name when it is complete, so an interrupted run leaves nothing behind.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Lock

from bench.gguf_header import header
from swarm.artifact.digest import compute_digest
from swarm.artifact.manifest import TensorEntry
from swarm.artifact.memory import format_bytes
from swarm.errors import ArtifactError, NotAModel, UsageError

Pieces = Iterable[bytes | memoryview]
Source = Callable[[TensorEntry], Pieces]  # the bytes of one tensor
Say = Callable[[str, int, int], None]  # what is going on, bytes done, bytes in all

PART = ".part"
_SPARE_BYTES = 256 << 20  # of disk, for headers and for the rest of the machine
_PROBE_BYTES = 1 << 30


@dataclass(frozen=True)
class PlannedFile:
    """One file: its header, where its tensors lie, and how long it is."""

    name: str
    header: bytes
    tensors: tuple[TensorEntry, ...]
    size_bytes: int


def planned_file(
    name: str, pairs: Sequence[bytes], tensors: Sequence[TensorEntry], *, header_bytes: int, size_bytes: int
) -> PlannedFile:
    """Raises NotAModel when header and tensors do not come out where the table says."""
    raw = header(pairs, [(tensor.name, tensor.type, tensor.dims, tensor.offset - header_bytes) for tensor in tensors])
    if len(raw) != header_bytes:
        raise NotAModel(f"{name}: the header has {len(raw)} bytes, not {header_bytes}; correct the table")
    return PlannedFile(name, raw, tuple(tensors), size_bytes)


def write_set(
    folder: Path, files: Sequence[PlannedFile], filled: Sequence[TensorEntry], source: Source, say: Say
) -> tuple[Path, ...]:
    """Writes the files, ``filled`` tensors from ``source``; returns their paths. Raises UsageError when some are there
    already, ArtifactError when the disk has no room or can't keep holes. Interrupted, it leaves nothing behind."""
    paths = tuple(folder / file.name for file in files)
    for path in paths:
        if path.exists():
            raise UsageError(f"{path} is already there; delete the old files, or choose another folder")
    check_disk(folder, sum(len(file.header) for file in files) + sum(tensor.bytes for tensor in filled))
    wanted = {tensor.name for tensor in filled}
    total, done = sum(tensor.bytes for tensor in filled), 0
    with _complete_or_gone(paths) as parts:
        for part, file in zip(parts, files, strict=True):
            with _creating(part) as stream:
                stream.truncate(file.size_bytes)
                stream.write(file.header)
                for tensor in file.tensors:
                    if tensor.name in wanted:
                        _write_tensor(stream.fileno(), tensor, source(tensor))
                        done += tensor.bytes
                        say("writing", done, total)
    return paths


def check_disk(folder: Path, n_bytes: int) -> None:
    """Room for the data, and holes that take none."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < n_bytes + _SPARE_BYTES:
        raise ArtifactError(
            f"{folder}: {format_bytes(n_bytes)} are to be written and {format_bytes(free)} are free; choose another "
            "folder, or fewer layers with noise"
        )
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.truncate(_PROBE_BYTES)
        probe.seek(_PROBE_BYTES - 1)
        probe.write(b"\0")
        probe.flush()
        os.fsync(probe.fileno())
        taken = os.fstat(probe.fileno()).st_blocks * 512
    if taken > _PROBE_BYTES // 64:
        raise ArtifactError(f"{folder}: this file system does not keep sparse files; choose a folder on another one")


def digest_set(paths: Sequence[Path], say: Say, threads: int = 2) -> tuple[str, ...]:
    """SHA-256 of each file, several at a time, kept beside them where a node looks for them. Holes are not read."""
    total, done = sum(path.stat().st_size for path in paths), 0
    lock = Lock()
    stopped = False

    def on_bytes(n_bytes: int) -> None:
        nonlocal done
        if stopped:
            raise InterruptedError
        with lock:
            done += n_bytes
            say("hashing", done, total)

    order = sorted(paths, key=lambda path: -path.stat().st_size)  # the longest first, so that the last end together
    with ThreadPoolExecutor(threads) as pool:
        futures = {path: pool.submit(compute_digest, path, on_bytes) for path in order}
        try:
            return tuple(futures[path].result() for path in paths)
        finally:
            stopped = True
            pool.shutdown(cancel_futures=True)


@contextmanager
def _complete_or_gone(paths: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    parts = tuple(path.with_name(path.name + PART) for path in paths)
    try:
        yield parts
        for part, path in zip(parts, paths, strict=True):
            part.rename(path)
    except BaseException:
        for path in (*parts, *paths):
            with suppress(FileNotFoundError):
                path.unlink()
        raise


@contextmanager
def _creating(part: Path) -> Iterator[FileIO]:
    try:
        with part.open("wb", buffering=0) as stream:
            yield stream
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.ENOSPC):
            raise ArtifactError(f"{part}: {error.strerror}; choose a folder on another disk") from error
        raise


def _write_tensor(descriptor: int, tensor: TensorEntry, pieces: Pieces) -> None:
    at = tensor.offset
    for piece in pieces:
        while piece:  # a call writes at most 2 GiB, and less when a signal comes
            written = os.pwrite(descriptor, piece, at)
            piece, at = piece[written:], at + written
    assert at == tensor.offset + tensor.bytes, f"{tensor.name}: wrong size"

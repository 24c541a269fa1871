"""SHA-256 of model files, computed once and kept beside the file.

The kept digest holds while size, both times of change and inode stay: hashing 200 GiB takes minutes, a look takes none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import platformdirs

from swarm.artifact.small_file import read_small, replace_file
from swarm.errors import NotAModel

Progress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in all

SUFFIX = ".sha256.json"
_BLOCK_BYTES = 4 << 20
_MAX_CACHE_BYTES = 4096
_ZEROS = bytes(_BLOCK_BYTES)


@dataclass(frozen=True)
class _Kept:
    """A digest and the state of the file it belongs to."""

    size: int
    mtime_ns: int
    ctime_ns: int  # changes with the content also where somebody sets the other time back
    inode: int
    sha256: str


def file_digests(paths: Sequence[Path], progress: Progress | None = None) -> tuple[str, ...]:
    """SHA-256 of each file in hex. ``progress`` is called only when something has to be read; what it raises passes."""
    known = [known_digest(path) for path in paths]
    total = sum(file_size(path) for path, digest in zip(paths, known, strict=True) if digest is None)
    done = 0

    def read(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress(done, total)

    return tuple(digest or compute_digest(path, read) for path, digest in zip(paths, known, strict=True))


def compute_digest(
    path: Path, on_bytes: Callable[[int], None], on_block: Callable[[bytes], None] = lambda _block: None
) -> str:
    """Reads the file whole and keeps its SHA-256. ``on_bytes`` hears of every block, and ``on_block`` has them; what
    they raise passes."""
    digest = hashlib.sha256()
    with _open(path) as stream:
        before = os.fstat(stream.fileno())
        for block in _blocks(stream, before.st_size, path):
            digest.update(block)
            on_block(block)
            on_bytes(len(block))
        after = os.fstat(stream.fileno())
    if _state(before) != _state(after):
        raise NotAModel(f"{path}: changed while it was read; wait until it is complete and start again")
    _keep(path, _Kept(*_state(after), digest.hexdigest()))
    return digest.hexdigest()


def _open(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise _unreadable(path, error) from error


def _blocks(stream: FileIO, size: int, path: Path) -> Iterator[bytes]:
    """At most ``size`` bytes: a file that grows as fast as it is read would never end. Holes are not read: their zeros
    would fill the page cache, 200 GiB of them for a model of which a node holds a part."""
    at = 0
    while at < size:
        try:
            data = _next_data(stream, at, size)
            for zeros in range(at, data, _BLOCK_BYTES):
                yield _ZEROS[: data - zeros]
            at = stream.seek(data)
            block = stream.read(min(size - at, _BLOCK_BYTES)) if at < size else b""
        except OSError as error:
            raise _unreadable(path, error) from error
        if not block:
            return
        at += len(block)
        yield block


def _next_data(stream: FileIO, at: int, size: int) -> int:
    """The first position from ``at`` on that is not in a hole; ``size`` when a hole is all that follows."""
    if not hasattr(os, "SEEK_DATA"):
        return at
    try:
        return min(size, os.lseek(stream.fileno(), at, os.SEEK_DATA))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        if error.errno == errno.EINVAL:  # a file system that keeps no holes
            return at
        raise


def _unreadable(path: Path, error: OSError) -> NotAModel:
    return NotAModel(f"{path}: can't be read ({error.strerror}); check the disk and the file's permissions")


def _state(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def file_size(path: Path) -> int:
    """Raises ``NotAModel`` for a file that is gone."""
    return _status(path).st_size


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error


def known_digest(path: Path) -> str | None:
    """The kept SHA-256 of a file that has not changed since."""
    state = _state(_status(path))
    for place in note_places(path, SUFFIX, ".json"):
        kept = _read(place)
        if kept is not None and (kept.size, kept.mtime_ns, kept.ctime_ns, kept.inode) == state:
            return kept.sha256
    return None


def note_places(path: Path, suffix: str, cache_suffix: str) -> tuple[Path, Path]:
    """Beside the file, and for folders that can't be written, in the user's cache under the file's path."""
    key = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()
    cache = platformdirs.user_cache_path("glm-swarm") / "digests"
    return path.with_name(path.name + suffix), cache / (key + cache_suffix)


def _read(place: Path) -> _Kept | None:
    try:
        kept = _Kept(**json.loads(read_small(place, _MAX_CACHE_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None  # absent or damaged: the digest is computed again
    is_digest = isinstance(kept.sha256, str) and len(kept.sha256) == 64 and set(kept.sha256) <= set("0123456789abcdef")
    return kept if is_digest else None


def _keep(path: Path, kept: _Kept) -> None:
    keep_note(note_places(path, SUFFIX, ".json"), json.dumps(asdict(kept)).encode())


def keep_note(places: Sequence[Path], data: bytes) -> None:
    """In the first of the places that can be written; nowhere when none can."""
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(place, data)
        except OSError:
            continue
        return

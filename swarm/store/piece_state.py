"""The state file beside a file of which this machine holds pieces: the digest of each piece that is durable.

It is written after the data, to a new file that takes the old one's place, and ends with a digest of itself. So a
process or a machine that dies at any moment leaves either state, and each is true.
"""

from __future__ import annotations

import errno
import os
import stat
from hashlib import sha256
from pathlib import Path
from struct import Struct

from swarm.ids import ArtifactId
from swarm.store.pieces import DIGEST_BYTES, PIECE_BYTES

SUFFIX = ".pieces"
_NEW = ".new"
_MAGIC = b"SWARMPCS"
_VERSION = 1
_HEAD = Struct("<8sI32sQQ")  # magic, version, artifact id, bytes of a piece, number of pieces
_PREFIX = Struct("<8sI32s")


class DamagedState(Exception):
    """Not a state file, cut off, or changed by something else."""


class ForeignState(Exception):
    """Of another artifact, or of a newer version of this program; the text says which."""


def read_state(path: Path, artifact_id: ArtifactId, n_pieces: int) -> bytearray:
    """The digests one after another, zeros for what is not here. Raises ``DamagedState``, ``ForeignState`` and
    ``OSError``."""
    size = _HEAD.size + (n_pieces + 1) * DIGEST_BYTES
    data = _read_most(path, size + 1)
    if len(data) < _PREFIX.size or not data.startswith(_MAGIC):
        raise DamagedState
    _, version, artifact = _PREFIX.unpack_from(data)
    is_sound = len(data) <= size and sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]
    if version != _VERSION and (is_sound or len(data) > size):
        raise ForeignState(f"written by another version of this program (format {version})")
    if not is_sound:
        raise DamagedState
    if artifact.hex() != artifact_id:
        raise ForeignState(f"of another model, artifact {artifact.hex()[:12]}")
    if data[: _HEAD.size] != _head(artifact_id, n_pieces) or len(data) < size:
        raise DamagedState
    return bytearray(data[_HEAD.size : -DIGEST_BYTES])


def _head(artifact_id: ArtifactId, n_pieces: int) -> bytes:
    return _HEAD.pack(_MAGIC, _VERSION, bytes.fromhex(artifact_id), PIECE_BYTES, n_pieces)


def _read_most(path: Path, max_bytes: int) -> bytes:
    """The start of a regular file, all of it if that is less. Raises ``OSError``, without waiting for a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return stream.read(max_bytes)


def artifact_of(path: Path) -> str | None:
    """Whose state this is, as far as it can be told; the state may be damaged. Raises ``OSError``."""
    data = _read_most(path, _PREFIX.size)
    return data[-32:].hex() if len(data) == _PREFIX.size and data.startswith(_MAGIC) else None


def write_state(path: Path, artifact_id: ArtifactId, digests: bytes | bytearray) -> None:
    """Replaces the state; durable when it returns. Raises ``OSError`` and leaves the old one then."""
    body = _head(artifact_id, len(digests) // DIGEST_BYTES) + digests
    new = remove_unfinished(path)
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(body + sha256(body).digest())
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_unfinished(path: Path) -> Path:
    """What a process left that was killed while it wrote a state; returns the name, always the same, for the next."""
    new = path.with_name(path.name + _NEW)
    new.unlink(missing_ok=True)
    return new


def sync_folder(folder: Path) -> None:
    """Makes names that came and went durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

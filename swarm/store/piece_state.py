"""The state file beside a file of which this machine holds pieces: the digest of each piece that is durable.

It is written after the data, to a new file that takes the old one's place, and ends with a digest of itself. So a
process or a machine that dies at any moment leaves either state, and each is true.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from struct import Struct

from swarm.artifact.small_file import read_small
from swarm.ids import ArtifactId
from swarm.store.pieces import DIGEST_BYTES, PIECE_BYTES

SUFFIX = ".pieces"
_NEW = ".new"
_MAGIC = b"SWARMPCS"
_VERSION = 1
_HEAD = Struct("<8sI32sQQ")  # magic, version, artifact id, bytes of a piece, number of pieces
_PREFIX = Struct("<8sI32s")
_MAX_BYTES = 256 << 20


class DamagedState(Exception):
    """Not a state file, cut off, or changed by something else."""


class ForeignState(Exception):
    """Of another artifact, or of a newer version of this program; the text says which."""


def read_state(path: Path, artifact_id: ArtifactId, n_pieces: int) -> bytearray:
    """The digests one after another, zeros for what is not here. Raises ``DamagedState``, ``ForeignState`` and
    ``OSError``."""
    data = read_small(path, _MAX_BYTES)
    if len(data) < _PREFIX.size or not data.startswith(_MAGIC):
        raise DamagedState
    _, version, _ = _PREFIX.unpack_from(data)
    body, own = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if len(data) < _HEAD.size + DIGEST_BYTES or sha256(body).digest() != own:
        raise DamagedState
    if version != _VERSION:
        raise ForeignState(f"written by another version of this program (format {version})")
    _, _, artifact, piece_bytes, count = _HEAD.unpack_from(data)
    if artifact.hex() != artifact_id:
        raise ForeignState(f"of another model, artifact {artifact.hex()[:12]}")
    digests = bytearray(body[_HEAD.size :])
    if (piece_bytes, count, len(digests)) != (PIECE_BYTES, n_pieces, n_pieces * DIGEST_BYTES):
        raise DamagedState
    return digests


def write_state(path: Path, artifact_id: ArtifactId, digests: bytes | bytearray) -> None:
    """Replaces the state; durable when it returns. Raises ``OSError`` and leaves the old one then."""
    body = _HEAD.pack(_MAGIC, _VERSION, bytes.fromhex(artifact_id), PIECE_BYTES, len(digests) // DIGEST_BYTES)
    body += digests
    new = path.with_name(path.name + _NEW)  # always the same name: what a killed process left is written over
    new.unlink(missing_ok=True)
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


def sync_folder(folder: Path) -> None:
    """Makes names that came and went durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Who this process is in the swarm: an Ed25519 key whose peer id contains the public key."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dht.errors import BadIdentity, IdentityInUse
from dht.peer_id import peer_id_of, public_key_of

logger = logging.getLogger(__name__)

# libp2p's PrivateKey message: type Ed25519 (1), data of 64 bytes (seed, then public key)
_PROTOBUF_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
_SEED_BYTES = 32


class Identity:
    """A private key, and the lock on its file that keeps a second process from using it. Close it, or use ``with``."""

    def __init__(self, key: Ed25519PrivateKey, path: Path | None = None, lock: BinaryIO | None = None) -> None:
        self._key = key
        self._lock = lock
        self.path = path
        self._public_key = key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self._public_key)

    @classmethod
    def ephemeral(cls) -> Identity:
        """A fresh key that lives in this process only."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path | str) -> Identity:
        """The key in ``path`` (libp2p's private-key protobuf, mode 0600), made on first use.

        Raises BadIdentity, and IdentityInUse while another process has it open.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = _take_lock(path)
        except OSError as error:
            raise BadIdentity(f"can't use identity {path}: {error.strerror}; choose another path") from error
        try:
            key = _read_key(path) if path.exists() else _write_new_key(path)
        except OSError as error:
            lock.close()
            raise BadIdentity(f"can't use identity {path}: {error.strerror}; choose another path") from error
        except BadIdentity:
            lock.close()
            raise
        return cls(key, path, lock)

    @staticmethod
    def peer_id_in(path: Path) -> str:
        """Of the key in ``path``, in use or not. Raises BadIdentity."""
        try:
            key = _parse_key(path.read_bytes())
        except OSError as error:
            raise BadIdentity(f"can't read identity {path}: {error.strerror}; choose another path") from error
        if key is None:
            raise BadIdentity(f"{path} holds no Ed25519 identity; choose another path")
        return Identity(key).peer_id

    @property
    def private_key_protobuf(self) -> bytes:
        return _to_protobuf(self._key)

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)

    @staticmethod
    @lru_cache(maxsize=2048)  # an entry is read from several nodes, every few seconds
    def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
        """Whether the owner of ``peer_id`` signed ``data``. False for ids that hold no Ed25519 key, too."""
        try:
            Ed25519PublicKey.from_public_bytes(public_key_of(peer_id)).verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        return True

    @contextmanager
    def file(self) -> Iterator[Path]:
        """A file with the key for the libp2p daemon: the identity's own, or one that lives as long as the block."""
        if self.path is not None:
            yield self.path
            return
        with _temporary_key_file(self.private_key_protobuf) as path:
            yield path

    def close(self) -> None:
        """Lets another process use the identity."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _take_lock(path: Path) -> BinaryIO:
    lock_path = path.with_name(path.name + ".lock")
    lock = os.fdopen(os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = lock.read(20).decode(errors="replace").strip() or "unknown"
        lock.close()
        raise IdentityInUse(
            f"identity {path} is used by process {holder}; stop it, or give this one another --identity"
        ) from None
    lock.truncate()
    lock.write(f"{os.getpid()}\n".encode())
    lock.flush()
    return lock


def _read_key(path: Path) -> Ed25519PrivateKey:
    data = path.read_bytes()
    key = _parse_key(data)
    if key is None:
        raise BadIdentity(f"{path} holds no Ed25519 identity; move it away and start again to get a new one")
    if path.stat().st_mode & 0o077:  # asked only now: another file, named by mistake, is none of our business
        logger.warning("identity %s could be read by others: access is now limited to its owner", path)
        path.chmod(0o600)
    return key


def _parse_key(data: bytes) -> Ed25519PrivateKey | None:
    seed = data[len(_PROTOBUF_PREFIX) :][:_SEED_BYTES]
    if not data.startswith(_PROTOBUF_PREFIX) or len(seed) != _SEED_BYTES:
        return None
    key = Ed25519PrivateKey.from_private_bytes(seed)
    return key if _to_protobuf(key) == data else None


def _write_new_key(path: Path) -> Ed25519PrivateKey:
    """Written beside and renamed: a crash can't leave half a key."""
    key = Ed25519PrivateKey.generate()
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(_to_protobuf(key))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    return key


@contextmanager
def _temporary_key_file(data: bytes) -> Iterator[Path]:
    import tempfile

    handle, name = tempfile.mkstemp(prefix="swarm-identity-")  # mode 0600
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _to_protobuf(key: Ed25519PrivateKey) -> bytes:
    return _PROTOBUF_PREFIX + key.private_bytes_raw() + key.public_key().public_bytes_raw()

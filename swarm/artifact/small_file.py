"""Small files beside models: notes and manifests, read and written so that nothing else of that name does harm."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path


def read_small(path: Path, max_bytes: int) -> bytes:
    """The whole file. Raises ``OSError`` also for what is no regular file, without waiting for its other end, and for
    more than ``max_bytes``."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        with os.fdopen(handle, "rb", closefd=False) as stream:
            data = stream.read(max_bytes + 1)
    finally:
        os.close(handle)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return data


def replace_file(path: Path, data: bytes) -> None:
    """Replaces the file at once, so that another process never reads half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new.")
    try:
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(handle, 0o644)
            stream.write(data)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise

"""Files with holes: whether a file system keeps them, where they are, how data becomes one again."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_PROBE_BYTES = 16 << 20
_BLOCK_BYTES = 8 << 20


def keeps_holes(folder: Path, size: int) -> bool:
    """Whether a file of ``size`` bytes of holes can be kept there, taking next to nothing. Leaves nothing behind.
    Raises ``OSError``: EFBIG when the file system or the process may not have a file of that size."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        os.ftruncate(probe.fileno(), min(size, _PROBE_BYTES))  # where there are no holes this one is written out
        os.pwrite(probe.fileno(), b"\1", min(size, _PROBE_BYTES) - 1)
        os.fsync(probe.fileno())
        if size >= _PROBE_BYTES and os.fstat(probe.fileno()).st_blocks * 512 > _PROBE_BYTES // 2:
            return False
        os.ftruncate(probe.fileno(), size)
    return True


def punch(handle: int, start: int, stop: int) -> None:
    """Makes bytes [start, stop) read as zeros and gives their blocks back. Raises ``OSError``: EOPNOTSUPP where the
    system or the file system can't."""
    call = _fallocate()
    if call is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    while call(handle, _PUNCH_HOLE | _KEEP_SIZE, start, stop - start):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


@cache
def _fallocate() -> ctypes._NamedFuncPointer | None:  # os has only posix_fallocate, which can't punch
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate64
    except (AttributeError, OSError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call.restype = ctypes.c_int
    return call


def data_ranges(handle: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of [start, stop) that take room, in blocks of the file system; all of it where it can't be told."""
    at = start
    while at < stop:
        try:
            data = os.lseek(handle, at, os.SEEK_DATA)
            hole = os.lseek(handle, data, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            if error.errno != errno.EINVAL:
                raise
            data, hole = at, stop
        if data < stop:
            yield data, min(hole, stop)
        at = hole


def data_bytes(handle: int, start: int, stop: int) -> int:
    """How much of [start, stop) takes room."""
    return sum(end - begin for begin, end in data_ranges(handle, start, stop))


def copy_range(source: int, target: int, start: int, stop: int) -> None:
    """Copies bytes to the same place in another file; shares the blocks where the file system can. Raises ``OSError``:
    EIO when the source ends early."""
    at = _copy_by_kernel(source, target, start, stop)
    while at < stop:
        block = os.pread(source, min(_BLOCK_BYTES, stop - at), at)
        if not block:
            raise OSError(errno.EIO, "the file ends early")
        at += os.pwrite(target, block, at)


def _copy_by_kernel(source: int, target: int, start: int, stop: int) -> int:
    """Up to where it came: some file systems can't, or not between each other."""
    at = start
    try:
        while at < stop:
            copied = os.copy_file_range(source, target, stop - at, at, at)
            if not copied:
                break
            at += copied
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF):
            raise
    except AttributeError:  # not Linux
        pass
    return at

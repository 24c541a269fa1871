"""What of a file lies in memory: asked from the kernel, page by page, without touching the file."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAGE = mmap.PAGESIZE
_READ_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def resident_pages(path: Path) -> npt.NDArray[np.bool_]:
    """One flag per page of the file: whether the page cache holds it. Raises OSError."""
    size = path.stat().st_size
    flags = np.zeros(-(-size // PAGE), np.uint8)
    if not size:
        return flags.view(np.bool_)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        try:
            address, out = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(flags.ctypes.data)
            if _libc.mincore(address, ctypes.c_size_t(size), out) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        finally:
            del view  # the mapping can't be closed under it
    return (flags & 1).view(np.bool_)


def resident_bytes(paths: Iterable[Path]) -> int:
    """Of all the files together."""
    return sum(int(np.count_nonzero(resident_pages(path))) for path in paths) * PAGE


def resident_in(pages: npt.NDArray[np.bool_], first: int, last: int) -> int:
    """How many of the file's whole pages inside the bytes [first, last) are resident: pages shared with a neighbour
    prove nothing."""
    return int(np.count_nonzero(pages[-(-first // PAGE) : last // PAGE]))


def drop(paths: Iterable[Path]) -> None:
    """Lets the kernel forget the files' pages; what another process maps, or is not written back, stays."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_ranges(path: Path, ranges: Sequence[tuple[int, int]]) -> int:
    """Reads the byte ranges (start, length), as the cheapest way to have them in the page cache; bytes read."""
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        return sum(n for start, length in ranges for n in _read(file.fileno(), start, length, memoryview(buffer)))


def _read(descriptor: int, start: int, length: int, buffer: memoryview) -> Iterator[int]:
    while length > 0:
        n = os.preadv(descriptor, [buffer[: min(length, len(buffer))]], start)
        if n == 0:
            return
        start, length = start + n, length - n
        yield n


@contextmanager
def dropped(paths: Sequence[Path]) -> Iterator[None]:
    """A block that starts and ends with none of the files in the page cache."""
    drop(paths)
    try:
        yield
    finally:
        drop(paths)

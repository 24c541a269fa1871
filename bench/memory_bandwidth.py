"""How fast this machine reads memory: plain streams over buffers that no cache holds, on an engine's threads."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

BUFFER_BYTES = 512 << 20  # a thread's; the largest caches have some hundred megabytes
ROUNDS = 5

_libc = ctypes.CDLL(None)
_libc.memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_libc.memchr.restype = ctypes.c_void_p


def read_bytes_per_second(threads: int, buffer_bytes: int = BUFFER_BYTES, rounds: int = ROUNDS) -> float:
    """The best of ``rounds``. ``memchr`` for a byte that is not there does nothing but read, with the widest vectors
    that the C library knows, and ctypes lets the other threads run."""
    buffers = [bytearray(b"\1") * buffer_bytes for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        return max(_once(pool, buffers) for _ in range(rounds))


def _once(pool: ThreadPoolExecutor, buffers: list[bytearray]) -> float:
    began = time.perf_counter()
    read = sum(pool.map(_scan, buffers))
    return read / (time.perf_counter() - began)


def _scan(buffer: bytearray) -> int:
    view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    if _libc.memchr(ctypes.addressof(view), 0, len(buffer)) is not None:
        raise AssertionError("a buffer without zeros has one")
    return len(buffer)

"""How the span's weights are held in memory: read on first use, read before serving, or locked.

Only the bytes of the span's tensors are touched, and of those only what the file holds: a partial file's holes would
fill the memory with zeros. Weights are locked through a mapping of the node's own; engine and node share the pages, so
they stay when the engine is started again.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import Lock

import numpy as np

from swarm.artifact.manifest import Manifest
from swarm.artifact.memory import SpanMemory, format_bytes
from swarm.errors import NotAModel, NotEnoughMemory
from swarm.store.holes import data_ranges

PAGE = mmap.PAGESIZE
STRIDE_BYTES = 32 << 20  # between two words about progress
_READ_BYTES = 1 << 20
_CAP_IPC_LOCK = 14  # of Linux: whoever has it may lock anything
_MORE = "raise it (ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit) or use --weights prefetched"

OnDone = Callable[[int], None]  # bytes done; may raise to stop

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of one file."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def span_ranges(manifest: Manifest, folder: Path, first: int, last: int, *, mtp: bool = False) -> list[Range]:
    """Where the span's weights lie, neighbours joined, in file order."""
    ranges: list[Range] = []
    for file, tensors in groupby(manifest.span_tensors(first, last, mtp=mtp), lambda tensor: tensor.file):
        path = folder / manifest.files[file].name
        joined = _joined((tensor.offset, tensor.offset + tensor.bytes) for tensor in tensors)
        ranges += [Range(path, start, stop) for start, stop in joined]
    return ranges


def held_parts(ranges: Iterable[Range]) -> list[Range]:
    """Those parts of the ranges that are no holes, grown to whole pages, each page once. Raises NotAModel."""
    parts: list[Range] = []
    for path, group in groupby(ranges, lambda part: part.path):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                found = [piece for part in group for piece in data_ranges(file.fileno(), part.start, part.stop)]
        except OSError as error:
            raise NotAModel(f"{path}: {error.strerror or error}; check the file and its permissions") from None
        pages = ((start // PAGE * PAGE, min(size, -(-stop // PAGE) * PAGE)) for start, stop in found)
        parts += [Range(path, start, stop) for start, stop in _joined(pages)]
    return parts


def _joined(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in pairs:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def read_in(parts: Sequence[Range], on_done: OnDone = lambda _n: None) -> int:
    """Reads the parts, so that the page cache has them; bytes read. Raises NotAModel."""
    buffer = memoryview(bytearray(_READ_BYTES))
    done = 0
    for part in parts:
        try:
            with part.path.open("rb", buffering=0) as file:
                start = part.start
                while start < part.stop:
                    n = os.preadv(file.fileno(), [buffer[: min(part.stop - start, _READ_BYTES)]], start)
                    if n == 0:
                        break  # the file has become shorter, which loading will tell
                    start, done = start + n, done + n
                    if start % STRIDE_BYTES < _READ_BYTES:
                        on_done(done)
        except OSError as error:
            raise NotAModel(f"{part.path}: {error.strerror or error}; check the disk") from None
    on_done(done)
    return done


class LockedWeights:
    """Pages of files that the kernel may not drop while this is open. ``close`` may be called again, and while another
    thread locks: that one ends after the pages it is at, with InterruptedError."""

    def __init__(self, parts: Sequence[Range]) -> None:
        self.parts = tuple(parts)
        self._maps: list[mmap.mmap] = []
        self._closed = False
        self._one_by_one = Lock()  # an address is used only while it is mapped

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def lock(self, on_done: OnDone = lambda _n: None) -> None:
        """Reads and locks; blocks for as long as reading takes. Raises NotEnoughMemory and NotAModel; nothing stays
        locked then."""
        check_lock_limit(self.size)
        done = 0
        try:
            for path, group in groupby(self.parts, lambda part: part.path):
                mapped = self._map(path)
                address = _address(mapped)
                for part in group:
                    for start in range(part.start, part.stop, STRIDE_BYTES):
                        n = min(STRIDE_BYTES, part.stop - start)
                        self._lock(path, address + start, n)
                        done += n
                        on_done(done)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._one_by_one:
            self._closed = True
            while self._maps:
                self._maps.pop().close()  # what is no longer mapped is no longer locked

    def _map(self, path: Path) -> mmap.mmap:
        with self._one_by_one:
            self._check_open()
            try:
                with path.open("rb") as file:
                    self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except (OSError, ValueError) as error:
                raise NotAModel(f"{path}: {error}; check the file and its permissions") from None
            return self._maps[-1]

    def _check_open(self) -> None:
        if self._closed:
            raise InterruptedError

    def _lock(self, path: Path, address: int, n_bytes: int) -> None:
        with self._one_by_one:
            self._check_open()
            if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes)) == 0:
                return
            code = ctypes.get_errno()
        if code in (errno.EPERM, errno.ENOMEM, errno.EAGAIN):
            raise NotEnoughMemory(
                f"{format_bytes(self.size)} of weights can't be locked in memory ({os.strerror(code)}): if the limit "
                f"for locked memory is the cause, {_MORE}"
            )
        raise NotAModel(f"{path}: locking its pages failed ({os.strerror(code)}); use --weights prefetched")


def _address(mapped: mmap.mmap) -> int:
    view = np.frombuffer(mapped, np.uint8)
    address: int = view.ctypes.data
    del view  # the mapping can't be closed under it
    return address


def check_lock_limit(n_bytes: int) -> None:
    """Before anything is read. Raises this process's soft limit where the hard one allows it; NotEnoughMemory where not
    even that is enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= n_bytes or _may_lock_anything():
        return
    if hard == resource.RLIM_INFINITY or hard >= n_bytes:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (n_bytes if hard == resource.RLIM_INFINITY else hard, hard))
        return
    raise NotEnoughMemory(
        f"--weights locked: {format_bytes(n_bytes)} are to be locked and this process may lock {format_bytes(hard)}; "
        f"{_MORE}"
    )


def _may_lock_anything() -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def cache_room(memory: SpanMemory, available_bytes: int) -> int:
    """What is left for the weights when everything else of the node has its place."""
    return max(0, available_bytes - (memory.total_bytes - memory.weights_bytes))


def cache_warning(memory: SpanMemory, available_bytes: int) -> str | None:
    """A line for the operator when the page cache can't hold the span's weights."""
    room = cache_room(memory, available_bytes)
    if room >= memory.weights_bytes:
        return None
    return (
        f"warning: the page cache has room for {format_bytes(room)} of the {format_bytes(memory.weights_bytes)} of "
        "weights; the rest is read from disk again for every token: name fewer layers, or free memory"
    )

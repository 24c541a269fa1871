"""One process at a time writes into a folder: a second one would mark pieces that the first overwrites. Several may
read what is there, and nobody writes meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from swarm.errors import StoreError
from swarm.store.store_errors import ELSEWHERE, store_errors

LOCK_NAME = ".lock"


class FolderLock:
    """Held until ``release`` or the end of the process, however it ends. The file stays: who waits for a lock must not
    find another file under its name."""

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        """Raises ``StoreError``, which names a process that holds it. ``shared``: with others that only read."""
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        path = folder / LOCK_NAME
        with store_errors(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            with store_errors(path):
                self._take(folder)
        except BaseException:
            self.release()
            raise

    def _take(self, folder: Path) -> None:
        try:
            fcntl.flock(self._handle, self._kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._handle, 32, 0).decode("ascii", "replace").strip()
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise StoreError(f"{folder}: in use by {who}; end that one first, or {ELSEWHERE}") from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """May be called again."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = -1

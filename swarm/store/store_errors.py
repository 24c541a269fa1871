"""What the system says about a folder, as an error that tells the user what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm.errors import StoreError

ELSEWHERE = "choose another folder with --data-dir"
_WHAT_NEXT = {
    errno.ENOSPC: f"make room there, or {ELSEWHERE}",
    errno.EDQUOT: f"make room there, or {ELSEWHERE}",
    errno.EFBIG: f"raise the limit (ulimit -f), or {ELSEWHERE} on a file system that takes files of this size",
    errno.EROFS: f"mount it for writing, or {ELSEWHERE}",
    errno.EACCES: f"give yourself the right to write there, or {ELSEWHERE}",
    errno.EPERM: f"give yourself the right to write there, or {ELSEWHERE}",
    errno.ELOOP: "it is a link; move it away",
    errno.EOPNOTSUPP: f"this file system can't do that; {ELSEWHERE} on another one",
    errno.EIO: f"check the disk, then start again: what was stored before is kept; or {ELSEWHERE}",
}


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turns ``OSError`` into ``StoreError``."""
    try:
        yield
    except OSError as error:
        what_next = _WHAT_NEXT.get(error.errno or 0, ELSEWHERE)
        raise StoreError(f"{path}: {error.strerror or error}; {what_next}") from error

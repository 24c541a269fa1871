"""Whether a folder has room for what is to be fetched into it, told before the first byte is."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from swarm.artifact.memory import format_bytes
from swarm.errors import StoreError
from swarm.store.holes import keeps_holes
from swarm.store.store_errors import ELSEWHERE, store_errors


@dataclass(frozen=True)
class Need:
    """``bytes`` are those that the disk does not hold yet; ``largest_file_bytes`` has holes."""

    bytes: int
    reserve_bytes: int
    largest_file_bytes: int


def check_room(folder: Path, need: Need) -> None:
    """Raises ``StoreError``, which says how much is missing."""
    _check_limit(folder, need.largest_file_bytes)
    check_free(folder, need.bytes, need.reserve_bytes)  # before anything is tried there
    with store_errors(folder):
        try:
            kept = keeps_holes(folder, need.largest_file_bytes)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise StoreError(_too_large(folder, need.largest_file_bytes, "this file system takes")) from error
            raise
    if not kept:
        raise StoreError(f"{folder}: this file system keeps no files with holes; {ELSEWHERE} on another one")


def check_free(folder: Path, n_bytes: int, reserve_bytes: int) -> None:
    with store_errors(folder):
        free = free_bytes(folder)
    missing = n_bytes + reserve_bytes - free
    if missing > 0:
        reserve = f", with {format_bytes(reserve_bytes)} to be left free" if reserve_bytes else ""
        raise StoreError(
            f"{folder}: {format_bytes(missing)} more have to be free: {format_bytes(n_bytes)} are to be stored{reserve}"
            f", and {format_bytes(free)} are free; make room there, choose fewer layers, or {ELSEWHERE}"
        )


def free_bytes(folder: Path) -> int:
    """For this user. Raises ``OSError``."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _check_limit(folder: Path, size: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit not in (resource.RLIM_INFINITY, -1) and limit < size:
        what = f"the limit of this process (ulimit -f) allows, {format_bytes(limit)}"
        raise StoreError(_too_large(folder, size, what))


def _too_large(folder: Path, size: int, than: str) -> str:
    return f"{folder}: a file of {format_bytes(size)} is more than {than}; raise that limit, or {ELSEWHERE}"

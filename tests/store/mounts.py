"""File systems mounted for a test, which is skipped where that is not allowed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def image_of(path: Path, size: int, *options: str) -> Path:
    """A file with an empty ext4 in it."""
    path.touch()
    os.truncate(path, size)
    try:
        made = subprocess.run(["mkfs.ext4", "-q", *options, str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("mkfs.ext4 is not installed")
    if made.returncode:
        pytest.skip(f"no such file system can be made here: {made.stderr.strip()}")
    return path

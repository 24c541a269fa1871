from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from swarm.node.paging import FEWEST_TOKENS, Paging, Reads, reads_of

GIB = 1 << 30


def test_weights_that_are_read_for_the_first_time_are_no_cause_for_alarm() -> None:
    paging = Paging(10 * GIB)
    assert paging.look(0, Reads()) is None
    assert paging.look(100, Reads(80_000, 10 * GIB)) is None


def test_weights_that_are_read_again_and_again_are_told_once() -> None:
    paging = Paging(10 * GIB)
    paging.look(0, Reads())
    line = paging.look(100, Reads(800_000, 100 * GIB))
    assert line is not None and "1.0 GiB are read from disk again for each token" in line
    assert "--weights locked" in line
    assert paging.look(200, Reads(1_600_000, 200 * GIB)) is None, "not at every look"
    assert paging.look(300, Reads(1_600_010, 200 * GIB)) is None
    assert paging.look(400, Reads(2_400_010, 300 * GIB)) is not None, "it was well in between"


def test_few_tokens_prove_nothing() -> None:
    paging = Paging(GIB)
    paging.look(0, Reads())
    assert paging.look(FEWEST_TOKENS - 1, Reads(10**6, 100 * GIB)) is None
    assert paging.look(FEWEST_TOKENS, Reads(10**6, 100 * GIB)) is not None, "they are counted on"


def test_another_engine_starts_from_nothing() -> None:
    paging = Paging(GIB)
    paging.look(0, Reads(5_000, 10 * GIB))
    assert paging.look(100, Reads(10, 0)) is None
    assert paging.look(200, Reads(20, 0)) is None


def test_a_page_that_is_read_from_disk_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = reads_of(os.getpid())
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert mapped[1 << 19] >= 0
    after = reads_of(os.getpid())
    if after.read_bytes == before.read_bytes:
        pytest.skip("this file system keeps its files in memory")
    assert after.major_faults > before.major_faults


def test_names_of_processes_confuse_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "stat").write_text("7 (a ) b 1 2 3) S 1 7 7 0 -1 4194304 100 0 42 0 5 6\n")
    (folder / "io").write_text("rchar: 1\nread_bytes: 4096\nwrite_bytes: 0\n")
    assert reads_of(7, proc=tmp_path) == Reads(42, 4096)

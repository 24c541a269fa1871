"""Disks that are full, can't be written, or can't keep files with holes: real ones, mounted for the test."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from bench.glm_layout import pinned_layout, write_twin
from bench.glm_metadata import GlmShape
from swarm.artifact.catalog import GLM52
from swarm.errors import StoreError
from swarm.store.partial_copy import PartialCopy
from swarm.store.room import Need, check_room, free_bytes
from tests.store import parts
from tests.store.parts import SMALL, Sample, every_piece, fill, wrong

LARGE = Sample((3 << 20,) * 8)


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """16 MiB, where the model has 24."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=16m", "tmpfs") as disk:
        yield disk


def test_a_disk_that_becomes_full_keeps_what_was_committed(small_disk: Path, tmp_path: Path) -> None:
    with PartialCopy.open(small_disk / "model", LARGE.manifest) as copy:
        pieces = every_piece(copy)
        fill(copy, LARGE, pieces[:4])
        with pytest.raises(StoreError, match="No space left on device; make room there, or choose another folder"):
            for piece in pieces[4:]:
                fill(copy, LARGE, [piece])
    with PartialCopy.open(small_disk / "model", LARGE.manifest) as copy:
        missing = copy.missing(pieces)
        assert 0 < len(missing) < len(pieces) - 4
        assert wrong(copy, LARGE) == []
        with pytest.raises(StoreError, match=r"[\d.]+ MiB more have to be free: .* are to be stored, and .* are free"):
            copy.check_room(pieces)
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        copy.check_room(pieces)
        fill(copy, LARGE, missing)
        assert all(copy.whole(file) for file in range(3))
    assert [(small_disk / "model" / file.name).read_bytes() for file in LARGE.manifest.files] == list(LARGE.files)


def test_a_disk_that_is_too_full_for_the_marks(small_disk: Path) -> None:
    """The state before it stays."""
    with PartialCopy.open(small_disk / "model", LARGE.manifest) as copy:
        pieces = every_piece(copy)
        fill(copy, LARGE, pieces[:4])
        copy.write(pieces[4], LARGE.data(pieces[4]))
        with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(bytes(4096))
        with pytest.raises(StoreError, match="No space left"):
            copy.commit()
        assert copy.missing(pieces) == pieces[4:]
    assert not list(small_disk.glob("model/*.new"))
    copy = PartialCopy.look(small_disk / "model", LARGE.manifest)
    assert copy.missing(pieces) == pieces[4:]
    assert wrong(copy, LARGE) == []


def test_the_reserve_stays_free(small_disk: Path) -> None:
    free = free_bytes(small_disk)
    folder = small_disk / "model"
    with PartialCopy.open(folder, SMALL.manifest, disk_reserve_bytes=free - (1 << 20)) as copy:
        pieces = every_piece(copy)
        copy.check_room(pieces)
        (small_disk / "filler").write_bytes(bytes(1 << 20))
        with pytest.raises(
            StoreError, match=r"KiB more have to be free: .* are to be stored, with 15.0 MiB to be left"
        ):
            copy.check_room(pieces)
        with pytest.raises(StoreError, match="to be left free"):
            fill(copy, SMALL, pieces[:5])
        assert copy.missing(pieces) == pieces[5:]  # what was there already is kept


def test_what_is_on_the_disk_already_is_not_counted_again(small_disk: Path) -> None:
    folder = small_disk / "model"
    with PartialCopy.open(folder, LARGE.manifest) as copy:
        wanted = every_piece(copy)[:7]  # 15 MiB with the headers
        for piece in wanted[:6]:
            copy.write(piece, LARGE.data(piece))
    with PartialCopy.open(folder, LARGE.manifest) as copy:  # as after kill -9
        assert copy.missing(wanted) == wanted
        copy.check_room(wanted)


def test_a_folder_that_can_not_be_written(small_disk: Path) -> None:
    folder = small_disk / "model"
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        fill(copy, SMALL, every_piece(copy)[:3])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for place in (folder, small_disk / "new"):
        with pytest.raises(StoreError, match="Read-only file system; mount it for writing, or choose another folder"):
            PartialCopy.open(place, SMALL.manifest)
    copy = PartialCopy.look(folder, SMALL.manifest)
    assert len(copy.missing(every_piece(copy))) == len(every_piece(copy)) - 3


@pytest.mark.skipif(os.getuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="give yourself the right to write there"):
        PartialCopy.open(folder, SMALL.manifest)


def test_a_limit_on_the_length_of_files(tmp_path: Path) -> None:
    limit = SMALL.manifest.files[1].size_bytes - 1
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=parts.store_under_limit, args=(tmp_path / "model", SMALL, limit, theirs))
    child.start()
    theirs.close()
    room, writing = ours.recv_bytes().decode(), ours.recv_bytes().decode()
    child.join()
    ours.close()
    assert "more than the limit of this process (ulimit -f) allows" in room
    assert "File too large; raise the limit (ulimit -f)" in writing
    assert child.exitcode == 0


def test_a_file_system_without_holes(tmp_path: Path) -> None:
    """In clusters of 16 MiB, so that a hole of less is none."""
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 1 << 30)
    make = ["mkfs.ext4", "-q", "-O", "bigalloc", "-C", str(16 << 20), str(image)]
    try:
        made = subprocess.run(make, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("mkfs.ext4 is not installed")
    if made.returncode:
        pytest.skip(f"no such file system can be made here: {made.stderr.strip()}")
    with (
        mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk,
        PartialCopy.open(disk / "model", Sample((40 << 20, 40 << 20)).manifest) as copy,
        pytest.raises(StoreError, match="this file system keeps no files with holes; choose another folder"),
    ):
        copy.check_room(every_piece(copy))


def test_a_file_system_with_shorter_files(tmp_path: Path) -> None:
    if not _is_ext4(tmp_path):
        pytest.skip("what the file system of the temporary folder takes is not known")
    with pytest.raises(StoreError, match=r"a file of 16\.0 TiB is more than this file system takes"):
        check_room(tmp_path, Need(0, 0, 16 << 40))  # one block too long


def _is_ext4(path: Path) -> bool:
    found = subprocess.run(["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True)
    return found.stdout.startswith("ext2/ext3")


def test_the_real_layout_costs_little(tmp_path: Path) -> None:
    """202 GiB in six files, of which only the headers are here."""
    written = write_twin(tmp_path / "twin", pinned_layout(), GlmShape())
    manifest = GLM52.manifest.with_file_names([path.name for path in written])
    first = written[0].read_bytes()
    manifest = replace(manifest, header_sha256=sha256(first).hexdigest())
    with PartialCopy.open(tmp_path / "model", manifest) as copy:
        for piece in copy.table.headers():
            with written[piece.file].open("rb") as stream:
                stream.seek(piece.start)
                copy.write(piece, stream.read(piece.bytes))
        span = copy.table.of_span(10, 14)
        copy.write(span[-1], bytes(span[-1].bytes))
        copy.commit()
        assert copy.local_copy().remarks == ()
        assert copy.taken_bytes(every_piece(copy)) < 32 << 20
        assert sum((tmp_path / "model" / file.name).stat().st_size for file in manifest.files) == 216_715_360_960
    start = time.process_time()
    PartialCopy.look(tmp_path / "model", manifest)
    assert time.process_time() - start < 0.5
    tracemalloc.start()
    copy = PartialCopy.look(tmp_path / "model", manifest)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert copy.has(span[-1])
    assert kept < 5 << 20
    assert most < 20 << 20

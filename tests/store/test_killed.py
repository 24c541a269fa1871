"""Processes that store parts of a model and are killed meanwhile: what counts as here is here, and the end is right."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from swarm.store.folder_lock import LOCK_NAME
from swarm.store.partial_copy import PartialCopy
from swarm.store.piece_state import SUFFIX
from tests.store import parts
from tests.store.mounts import image_of, mounted
from tests.store.parts import SMALL, every_piece, fill, wrong

KILLS = 50
MODULES = ["swarm.store.partial_copy", "tests.store.parts"]


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@contextmanager
def _storing(processes: ForkServerContext, folder: Path, seed: int) -> Iterator[tuple[int, bool]]:
    """The id of a process that stores parts, after some events and a moment, and whether it was done before. Killed at
    the end."""
    chance = random.Random(seed)
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=parts.store_until_killed, args=(folder, SMALL, seed, theirs))
    child.start()
    theirs.close()
    try:
        is_done = any(ours.recv_bytes() == b"e" for _ in range(chance.randint(1, 30)))
        until = time.perf_counter() + chance.uniform(0, 0.003)
        while time.perf_counter() < until:  # a moment within what it does after the event
            pass
        yield child.pid or 0, is_done
    finally:
        child.kill()
        child.join()
        ours.close()


def _lose_some(folder: Path, seed: int) -> None:
    """So that there is something to store again."""
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        chosen = random.Random(seed).sample(every_piece(copy), 30)
        copy.forget(chosen[:15])
        copy.free(chosen[15:])


def test_killed_at_50_moments_and_gone_on_with(processes: ForkServerContext, folder: Path) -> None:
    held = 0
    for seed in range(KILLS):
        with _storing(processes, folder, seed) as (_, is_done):
            pass
        if is_done:
            _lose_some(folder, seed)
        copy = PartialCopy.look(folder, SMALL.manifest)
        assert wrong(copy, SMALL) == []
        assert copy.remarks == ()
        held = max(held, copy.held_bytes(every_piece(copy)))
    assert held  # it was not in vain
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        fill(copy, SMALL, copy.missing(every_piece(copy)))
        assert all(copy.whole(file) for file in range(3))
    names = [file.name for file in SMALL.manifest.files]
    assert [(folder / name).read_bytes() for name in names] == list(SMALL.files)
    left = {path.name for path in folder.iterdir()}
    assert left == {LOCK_NAME, *names, *(name + SUFFIX for name in names)}


def test_a_machine_that_dies(processes: ForkServerContext, tmp_path: Path) -> None:
    """What has reached the disk at ten moments, found by mounting copies of the disk: the page cache is not in them."""
    image = image_of(tmp_path / "image", 24 << 20)
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:
        for seed in range(10):
            with _storing(processes, disk / "model", seed) as (pid, is_done):
                _stop(pid)
                shutil.copyfile(image, tmp_path / f"image {seed}")
            if is_done:
                _lose_some(disk / "model", seed)
    held = 0
    for seed in range(10):
        with mounted(tmp_path / f"disk {seed}", "-o", "loop", str(tmp_path / f"image {seed}")) as disk:
            if (disk / "model").exists():
                copy = PartialCopy.look(disk / "model", SMALL.manifest)
                assert wrong(copy, SMALL) == []
                assert copy.remarks == ()
                held += copy.held_bytes(every_piece(copy))
    assert held


def _stop(pid: int) -> None:
    """Waits until it has stopped: it may be waiting for the disk."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.001)

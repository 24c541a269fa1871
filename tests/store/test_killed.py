"""Processes that store parts of a model and are killed meanwhile: what counts as here is here, and the end is right."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from swarm.store.folder_lock import LOCK_NAME
from swarm.store.partial_copy import PartialCopy
from swarm.store.piece_state import SUFFIX
from tests.store import parts
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


def _kill_one(processes: ForkServerContext, folder: Path, seed: int) -> bool:
    """After some events and a moment; False when it was done before."""
    chance = random.Random(seed)
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=parts.store_until_killed, args=(folder, SMALL, seed, theirs))
    child.start()
    theirs.close()
    try:
        done = any(ours.recv_bytes() == b"e" for _ in range(chance.randint(1, 30)))
        until = time.perf_counter() + chance.uniform(0, 0.003)
        while time.perf_counter() < until:  # a moment within what it does after the event
            pass
    finally:
        child.kill()
        child.join()
        ours.close()
    return not done


def test_killed_at_50_moments_and_gone_on_with(processes: ForkServerContext, folder: Path) -> None:
    held = 0
    for seed in range(KILLS):
        if not _kill_one(processes, folder, seed):
            with PartialCopy.open(folder, SMALL.manifest) as copy:
                chosen = random.Random(seed).sample(every_piece(copy), 30)
                copy.forget(chosen[:15])
                copy.free(chosen[15:])
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

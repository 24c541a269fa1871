"""What may wait for the engine: limits of a peer and of all, and who comes in all the same."""

from __future__ import annotations

import asyncio

from swarm.ids import PeerId
from swarm.node.config import Limits
from swarm.node.load import Load
from swarm.node.scheduler import MAX_SHARED_ROWS

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def load_of(peer: int, everybody: int) -> Load:
    return Load(Limits(tokens_in_flight_per_peer=peer, tokens_in_flight=everybody))


def admits(load: Load, peer: PeerId, n_tokens: int) -> bool:
    return load.admits(peer, n_tokens, asyncio.Event())


def test_limits() -> None:
    load = load_of(200, 300)
    load.add(A, 100)
    assert admits(load, A, 100)
    assert not admits(load, A, 101)
    load.add(A, 100)
    load.add(B, 90)
    assert not admits(load, B, 100), "290 are held"
    assert admits(load, C, 100), "of each peer one step, or the scheduler could not be fair"
    assert admits(load, A, MAX_SHARED_ROWS), "decode rows are small, and must not wait for chunks"


def test_a_step_that_is_larger_than_the_limit_still_comes_in_alone() -> None:
    load = load_of(100, 100)
    assert admits(load, A, 512)
    load.add(A, 512)
    assert not admits(load, A, 33)


def test_who_waits_is_told_and_nothing_is_left() -> None:
    load = load_of(100, 1000)
    changed = asyncio.Event()
    load.add(A, 100)
    load.add(A, 5)
    assert not load.admits(A, 64, changed)
    load.remove(A, 5)
    assert not changed.is_set(), "few rows are not counted"
    load.remove(A, 100)
    assert changed.is_set()
    assert (load.total, load.of(A)) == (0, 0)

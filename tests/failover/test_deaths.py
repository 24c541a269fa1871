"""Hops that die while they are needed: the answer is the one an undisturbed run would have given."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from swarm.client import Generation
from tests.client.scripted import until
from tests.failover.runs import N_TOKENS, Disturb, Rig, on_route

pytestmark = pytest.mark.asyncio(loop_scope="module")

Moment = Callable[[list[Generation]], bool]
ENTRY, MIDDLE, EXIT = 0, 1, 2


def mid_prefill(generations: list[Generation]) -> bool:
    return any(2 <= len(one.progress.prefill) < 10 for one in generations)


def first_token(generations: list[Generation]) -> bool:
    return any(len(one.progress.token_ids) == 1 for one in generations)


def mid_decode(generations: list[Generation]) -> bool:
    return any(8 <= len(one.progress.token_ids) < N_TOKENS - 4 for one in generations)


class Strike:
    """Something that happens once, when the moment has come, to the hops of ``struck``."""

    struck: Generation

    def __init__(self, moment: Moment, act: Callable[[Generation], None]) -> None:
        self._moment = moment
        self._act = act
        self.done = False

    def __call__(self, generations: list[Generation]) -> None:
        if not self.done and all(one.route for one in generations) and self._moment(generations):
            self.done = True
            self.struck = generations[0]
            self._act(self.struck)


def kill(swarm: Rig, *hops: int) -> Callable[[Generation], None]:
    def act(generation: Generation) -> None:
        for hop in hops:
            swarm.yard.kill(on_route(generation, hop))

    return act


def kill_engine(swarm: Rig, hop: int) -> Callable[[Generation], None]:
    return lambda generation: swarm.yard.kill_engine(on_route(generation, hop))


class _OnRecovery(logging.Handler):
    def __init__(self, strike: Strike, act: Callable[[Generation], None]) -> None:
        super().__init__(logging.INFO)
        self._strike = strike
        self._act: Callable[[Generation], None] | None = act

    def emit(self, record: logging.LogRecord) -> None:
        if self._strike.done and self._act is not None:
            act, self._act = self._act, None
            act(self._strike.struck)


@contextmanager
def on_recovery(strike: Strike, act: Callable[[Generation], None]) -> Iterator[None]:
    """``act`` strikes once, too: in the middle of the recovery from ``strike``."""
    logger, handler = logging.getLogger("swarm.client.recovery"), _OnRecovery(strike, act)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def told(generations: list[Generation]) -> list[str]:
    return [line for one in generations for recovery in one.progress.recoveries for line in recovery.story]


async def struck(swarm: Rig, strike: Disturb) -> list[Generation]:
    generations = await swarm.answers(strike)
    assert isinstance(strike, Strike) and strike.done
    assert any(one.progress.recoveries for one in generations)
    return generations


CELLS = [
    pytest.param((MIDDLE,), mid_decode, id="middle-mid-decode"),
    pytest.param((ENTRY,), mid_prefill, id="entry-mid-prefill", marks=pytest.mark.slow),
    pytest.param((EXIT,), first_token, id="exit-first-token", marks=pytest.mark.slow),
    pytest.param((ENTRY, MIDDLE, EXIT), mid_decode, id="all-mid-decode"),
]


ENGINES = [
    pytest.param(ENTRY, mid_prefill, id="entry-mid-prefill"),
    pytest.param(MIDDLE, first_token, id="middle-first-token"),
    pytest.param(EXIT, mid_decode, id="exit-mid-decode"),
]


@pytest.mark.parametrize(("hop", "moment"), ENGINES)
async def test_killed_engines(swarm: Rig, hop: int, moment: Moment) -> None:
    """The node goes on, without what it held."""
    generations = await struck(swarm, Strike(moment, kill_engine(swarm, hop)))
    assert any("lost its engine" in line for line in told(generations))
    assert not swarm.client._avoided.now(), "a node is not to blame for its engine"


async def test_two_engines_that_die_at_a_time_are_not_the_session_s_fault(swarm: Rig) -> None:
    """It may have been in both, but with others; what happens to one that is at fault: test_poison.py."""
    strike = Strike(mid_decode, kill_engine(swarm, MIDDLE))
    with on_recovery(strike, kill_engine(swarm, EXIT)):
        generations = await struck(swarm, strike)
    assert sum("lost its engine" in line for line in told(generations)) >= 2


@pytest.mark.parametrize("hop", [ENTRY, pytest.param(EXIT, marks=pytest.mark.slow)])
async def test_a_frozen_node_is_left_behind_and_does_no_harm_when_it_wakes(swarm: Rig, hop: int) -> None:
    frozen: list[str] = []

    def freeze(generation: Generation) -> None:
        frozen.append(on_route(generation, hop))
        swarm.yard.signal(frozen[0], signal.SIGSTOP)

    try:
        generations = await struck(swarm, Strike(mid_decode, freeze))
    finally:
        swarm.yard.signal(frozen[0], signal.SIGCONT)
    assert any("has been silent" in line for line in told(generations))
    assert all(on_route(one, hop) != frozen[0] for one in generations)


@pytest.mark.parametrize(("hops", "moment"), CELLS)
async def test_killed_nodes(swarm: Rig, hops: tuple[int, ...], moment: Moment) -> None:
    generations = await struck(swarm, Strike(moment, kill(swarm, *hops)))
    recovery = generations[0].progress.recoveries[-1]
    assert {layers for _, layers in recovery.lost} >= {generations[0].route[hop].layers for hop in hops}
    pause = recovery.planning_seconds + recovery.replay_seconds
    assert 0 <= recovery.recompute_seconds <= pause and pause > 0
    assert recovery.recompute_seconds > 0 or recovery.position == 0


async def test_a_death_during_the_recovery_from_another(swarm: Rig) -> None:
    strike = Strike(mid_decode, kill(swarm, MIDDLE))
    with on_recovery(strike, kill(swarm, ENTRY)):
        generations = await struck(swarm, strike)
    assert {layers for one in generations for r in one.progress.recoveries for _, layers in r.lost} == {(0, 2), (2, 4)}


@pytest.mark.slow
async def test_without_a_replacement_it_waits_for_one(swarm: Rig) -> None:
    def both(generation: Generation) -> None:
        swarm.yard.kill("b0")
        swarm.yard.kill("b1")

    async with asyncio.TaskGroup() as group:
        answering = group.create_task(swarm.answers(Strike(mid_decode, both)))
        await until(lambda: any("to go on" in line for line in swarm.said))
        await asyncio.to_thread(swarm.yard.revive)
        generations = await answering
    assert any("no peer serves layers 2:4" in line or "failed a moment ago" in line for line in swarm.said)
    assert all(one.progress.recoveries for one in generations)


@pytest.mark.slow
async def test_a_hop_that_is_dead_when_the_session_opens(swarm: Rig) -> None:
    route = [on_route(one, MIDDLE) for one in await swarm.answers()]
    swarm.yard.kill(route[0])
    await swarm.answers()

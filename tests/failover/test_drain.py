"""Nodes that leave while they are needed: what they hold moves, and nothing is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from swarm.client import Generation
from swarm.client.lasting import LastingSession
from swarm.errors import SwarmError
from tests.client.scripted import until
from tests.failover.rows import Gate, Walk, hop_names
from tests.failover.runs import PROMPT, Rig, name_of, on_route
from tests.failover.test_deaths import ENTRY, EXIT, MIDDLE, Strike, mid_decode, mid_prefill

pytestmark = pytest.mark.asyncio(loop_scope="module")

WALK = Walk(PROMPT, 30)
CONTEXT_TOKENS = 256
MID_PREFILL, MID_DECODE = (48, 144), (208, 220)  # a node is asked to leave there, and is out of the chain here


async def undisturbed(swarm: Rig) -> list[bytes]:
    async with await swarm.client.open_session(CONTEXT_TOKENS) as session:
        return await WALK.rows(session)


def leaving(swarm: Rig, hops: tuple[int, ...], moment: tuple[int, int], left: list[str]) -> Gate:
    """Goes on while what they hold is being copied."""

    async def gate(session: LastingSession, position: int) -> None:
        if position == moment[0]:
            left.extend(hop_names(swarm, session)[hop] for hop in hops)
            for name in left:
                swarm.yard.drain(name)
        if position == moment[1]:
            await until(lambda: not set(left) & set(hop_names(swarm, session)))

    return gate


CELLS = [
    pytest.param((ENTRY,), MID_PREFILL, id="entry-mid-prefill"),
    pytest.param((MIDDLE,), MID_DECODE, id="middle-mid-decode"),
    pytest.param((EXIT,), MID_PREFILL, id="exit-mid-prefill", marks=pytest.mark.slow),
    pytest.param((ENTRY, MIDDLE, EXIT), MID_DECODE, id="all-mid-decode", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("hops", "moment"), CELLS)
async def test_a_leaving_node_hands_over_what_it_holds(
    swarm: Rig, hops: tuple[int, ...], moment: tuple[int, int]
) -> None:
    expected, left = await undisturbed(swarm), list[str]()
    async with await swarm.client.open_session(CONTEXT_TOKENS) as session:
        assert await WALK.rows(session, leaving(swarm, hops, moment, left)) == expected
        assert len(session.recoveries) >= 1
        for handed in session.recoveries:
            assert handed.voluntary and "leaves the swarm" in str(handed)
            assert (handed.copied_tokens, handed.replayed_tokens) == (handed.position, 0)
            assert moment[0] <= handed.position <= moment[1]
        await until(lambda: all(swarm.yard.has_left(name) for name in left))
    assert not swarm.client._avoided.now()


async def test_greedy_and_sampled_answers_stay_the_same(swarm: Rig) -> None:
    """They may be at their end before anything has moved: the node stays as long as it is needed."""

    def leave(*hops: int) -> Callable[[Generation], None]:
        def act(generation: Generation) -> None:
            for hop in hops:
                swarm.yard.drain(on_route(generation, hop))

        return act

    strike = Strike(mid_prefill, leave(MIDDLE))
    await swarm.answers(strike)
    assert strike.done
    await swarm.whole_again()
    strike = Strike(mid_decode, leave(ENTRY, EXIT))
    await swarm.answers(strike)
    assert strike.done


def is_draining(session: LastingSession) -> bool:
    return any(hop.draining_until for hop in session.chain.hops)


def has_understudy(session: LastingSession) -> bool:
    return bool(session._recovery.understudies.peers())


def is_copied(session: LastingSession) -> bool:
    return any(one.copied_tokens for one in session._recovery.understudies.ready())


@pytest.mark.parametrize("stage", [is_draining, has_understudy, is_copied])
async def test_a_session_that_closes_while_it_moves_leaves_nothing_behind(
    swarm: Rig, stage: Callable[[LastingSession], bool]
) -> None:
    """Of which the fixture makes sure."""
    session = await swarm.client.open_session(CONTEXT_TOKENS)

    async def gate(session: LastingSession, position: int) -> None:
        if position == MID_DECODE[0]:
            leaving = session.places[MIDDLE]
            swarm.yard.drain(name_of(leaving.name))
            await until(lambda: stage(session) or leaving not in session.places)
            await session.close()

    with pytest.raises(SwarmError, match="closed"):
        await WALK.rows(session, gate)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "chain session"]

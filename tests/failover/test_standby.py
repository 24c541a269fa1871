"""A second replica that is given finished blocks: a death costs what came after the last of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from swarm.client.lasting import LastingSession
from swarm.protocol.limits import STATE_BLOCK_TOKENS
from tests.client.scripted import until
from tests.failover.rows import Walk, hop_names
from tests.failover.runs import Rig, name_of, rig
from tests.failover.test_deaths import ENTRY, EXIT, MIDDLE
from tests.failover.yard import Yard, yard

pytestmark = pytest.mark.asyncio(loop_scope="module")

# one exit only, and one node that computes with other numerics
SPANS = {"a0": (0, 2), "a1": (0, 2), "b0": (2, 4), "b1": (2, 4), "c0": (4, 6), "b2": (2, 4)}
CONTEXT_TOKENS = 1024
WALK = Walk([(7 * at + at * at) % 250 for at in range(600)], 30)
STRUCK_AT = 610


@pytest.fixture(scope="module")
def nodes(llama_untied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    slots = ("--slots", f"4x{CONTEXT_TOKENS}")
    options = dict.fromkeys(SPANS, slots) | {"b2": (*slots, "--kv-type", "f32")}
    with yard(llama_untied_path, tmp_path_factory.mktemp("yard"), SPANS, options) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(nodes: Yard, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with rig(nodes, tmp_path_factory.mktemp("client"), standby=True) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected(started: Rig) -> list[bytes]:
    async with await started.client.open_session(CONTEXT_TOKENS) as session:
        rows = await WALK.rows(session)
    await started.whole_again()
    return rows


async def covered(session: LastingSession, hop: int) -> str:
    """The node that waits for a hop's place, once it holds a block."""
    primary = session.places[hop].peer_id
    understudies = session._recovery.understudies
    await until(lambda: any(one.copied_tokens >= STATE_BLOCK_TOKENS for one in understudies.of(primary)))
    (one,) = understudies.of(primary)
    return name_of(one.hop.place.name)


async def test_a_death_costs_what_came_after_the_last_block(swarm: Rig, expected: list[bytes]) -> None:
    waiting: list[str] = []

    async def gate(session: LastingSession, position: int) -> None:
        if position == STRUCK_AT:
            waiting.append(await covered(session, MIDDLE))
            swarm.yard.kill(hop_names(swarm, session)[MIDDLE])

    async with await swarm.client.open_session(CONTEXT_TOKENS) as session:
        assert await WALK.rows(session, gate) == expected
        (recovery,) = session.recoveries
        assert hop_names(swarm, session)[MIDDLE] == waiting[0]
    assert not recovery.voluntary and recovery.position == STRUCK_AT
    assert recovery.copied_tokens == STATE_BLOCK_TOKENS
    assert recovery.replayed_tokens == STRUCK_AT - STATE_BLOCK_TOKENS


async def test_a_node_that_waits_may_die(swarm: Rig, expected: list[bytes]) -> None:
    async def gate(session: LastingSession, position: int) -> None:
        if position == STRUCK_AT:
            swarm.yard.kill(await covered(session, ENTRY))

    async with await swarm.client.open_session(CONTEXT_TOKENS) as session:
        assert await WALK.rows(session, gate) == expected
        assert not session.recoveries


@pytest.mark.slow
async def test_when_both_die_it_waits_for_another_and_replays_all(swarm: Rig, expected: list[bytes]) -> None:
    async def gate(session: LastingSession, position: int) -> None:
        if position == STRUCK_AT:
            swarm.yard.kill(await covered(session, ENTRY))
            swarm.yard.kill(hop_names(swarm, session)[ENTRY])

    async with asyncio.TaskGroup() as group, await swarm.client.open_session(CONTEXT_TOKENS) as session:
        walking = group.create_task(WALK.rows(session, gate))
        await until(lambda: any("to go on" in line for line in swarm.said))
        await asyncio.to_thread(swarm.yard.revive)
        assert await walking == expected
        (recovery,) = session.recoveries
        assert (recovery.copied_tokens, recovery.replayed_tokens) == (None, STRUCK_AT)


@pytest.mark.slow
async def test_one_that_waits_is_given_the_rest_when_its_primary_leaves(swarm: Rig, expected: list[bytes]) -> None:
    waiting: list[str] = []

    async def gate(session: LastingSession, position: int) -> None:
        names = hop_names(swarm, session)
        if position == STRUCK_AT:
            waiting.append(await covered(session, MIDDLE))
            swarm.yard.drain(names[MIDDLE])
        if position == STRUCK_AT + 10:
            await until(lambda: hop_names(swarm, session)[MIDDLE] == waiting[0])

    async with await swarm.client.open_session(CONTEXT_TOKENS) as session:
        assert await WALK.rows(session, gate) == expected
        (handed,) = session.recoveries
    assert handed.voluntary and (handed.copied_tokens, handed.replayed_tokens) == (handed.position, 0)


async def test_with_nobody_alike_an_answer_ends_where_it_is(swarm: Rig, expected: list[bytes]) -> None:
    """The only exit leaves, and a node that only one with other numerics could follow."""
    leaving: list[str] = []

    async def gate(session: LastingSession, position: int) -> None:
        names = hop_names(swarm, session)
        if position == STRUCK_AT:
            swarm.yard.kill(({"b0", "b1"} - {names[MIDDLE]}).pop())
            leaving.extend((names[MIDDLE], names[EXIT]))
            for name in leaving:
                swarm.yard.drain(name)
            await until(lambda: sum(hop.draining_until is not None for hop in session.chain.hops) == 2)

    async with await swarm.client.open_session(CONTEXT_TOKENS) as session:
        assert await WALK.rows(session, gate) == expected
        assert not session.recoveries
        assert [name for name in hop_names(swarm, session) if name in leaving] == leaving
    await until(lambda: all(swarm.yard.has_left(name) for name in leaving))

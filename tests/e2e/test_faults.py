"""The fault kit does what it says to real nodes, at the point of a request that was asked for."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from bench.faults import Accounting, Fault, Moment, idle_accounts, injected, node_door, until_accounts, watched_swarm
from bench.links.linked_swarm import LinkedNode, LinkedSwarm
from swarm.client import ClientConfig, Generation, GenerationOptions, SwarmClient
from swarm.client.config import Timeouts
from swarm.errors import SwarmError

OPTIONS = ["--slots", "2x256", "--threads", "1", "--memory", "1GiB", "--chunk-tokens", "8"]
PROMPT = list(range(20))
N_TOKENS = 6
SILENCE_SECONDS = 4.0  # that counts as death here

# of the middle hop, at which moment; nobody else has its layers
UNNOTICED = [
    (Fault.LINK_SLOW, Moment.FIRST_TOKEN),
    (Fault.JOURNAL_DISK_FULL, Moment.MID_DECODE),
]
MENDED = [
    (Fault.GARBAGE_FRAME, Moment.MID_PREFILL),
    (Fault.LINK_RESET, Moment.MID_DECODE),
    (Fault.KILL_ENGINE, Moment.SESSION_OPEN),
]


@pytest.mark.slow
async def test_faults_at_their_moments(llama_untied_path: Path, tmp_path: Path) -> None:
    """One swarm for all: it takes seconds to start. Each fault leaves the nodes as it found them."""
    async with watched_swarm(llama_untied_path, [(0, 2), (2, 4), (4, 6)], tmp_path, OPTIONS) as swarm:
        timeouts = Timeouts(connect_seconds=5.0, heartbeat_interval_seconds=0.5, heartbeat_seconds=SILENCE_SECONDS)
        async with SwarmClient.connect([swarm.address], ClientConfig(timeouts, tmp_path)) as client:
            middle = swarm.nodes[1]
            undisturbed = await _answer(client)
            before = await idle_accounts(swarm)
            for fault, moment in UNNOTICED:
                async with _at(swarm, middle, client, moment) as answer, injected(fault, swarm, middle):
                    _check_effect(fault, middle)
                    await node_door(middle).release()
                    assert await answer == undisturbed, fault
                await until_accounts(swarm, before)
            for fault, moment in MENDED:
                async with _at(swarm, middle, client, moment) as answer, injected(fault, swarm, middle):
                    await node_door(middle).release()
                    assert await answer == undisturbed, fault
                await until_accounts(swarm, before)
            await _stop(swarm, client, undisturbed)
            await until_accounts(swarm, before)
            await _partition(swarm, client)
            await _kill(swarm, client, undisturbed)


@contextlib.asynccontextmanager
async def _at(
    swarm: LinkedSwarm, node: LinkedNode, client: SwarmClient, moment: Moment
) -> AsyncIterator[asyncio.Task[list[int]]]:
    """An answer on its way that has come to ``moment`` at ``node``."""
    position = moment.position(len(PROMPT), N_TOKENS)
    await node_door(node).hold_at(position)
    generation = await _generation(client)
    answer = asyncio.create_task(_tokens(generation))
    try:
        await node_door(node).held()
        _check_moment(moment, generation)
        entry = (await Accounting.of(swarm.nodes[0])).held  # it has computed the step that is held here
        assert (entry["sessions"], entry["kv_tokens"] > position - 8) == (1, True)
        assert (await Accounting.of(node)).held["engine_tokens"] <= position
        yield answer
    finally:
        answer.cancel()
        await asyncio.wait([answer])


def _check_moment(moment: Moment, generation: Generation) -> None:
    drawn = len(generation.progress.token_ids)
    assert drawn == {Moment.FIRST_TOKEN: 1, Moment.MID_DECODE: 1 + N_TOKENS // 2}.get(moment, 0)


def _check_effect(fault: Fault, node: LinkedNode) -> None:
    if fault is Fault.JOURNAL_DISK_FULL:
        assert resource.prlimit(node.pid, resource.RLIMIT_FSIZE)[0] < 64 << 10


async def _generation(client: SwarmClient) -> Generation:
    return await client.generate(PROMPT, GenerationOptions(max_tokens=N_TOKENS))


async def _tokens(generation: Generation) -> list[int]:
    await generation.finish()
    return generation.progress.token_ids


async def _answer(client: SwarmClient) -> list[int]:
    return await _tokens(await _generation(client))


async def _answer_in_the_end(client: SwarmClient) -> list[int]:
    async with asyncio.timeout(90):
        while True:
            try:
                return await _answer(client)
            except SwarmError:
                await asyncio.sleep(0.2)


async def _partition(swarm: LinkedSwarm, client: SwarmClient) -> None:
    """The client reaches both sides, the sides not each other."""
    first, middle, last = swarm.nodes
    async with injected(Fault.DHT_PARTITION, swarm, middle):
        passed = [swarm.edge(middle, other).passed_bytes for other in (first, last)]
        async with await client.open_session(64) as session:
            assert [place.peer_id for place in session.places] == [node.peer_id for node in swarm.nodes]
        assert [swarm.edge(middle, other).passed_bytes for other in (first, last)] == passed
        assert swarm.edge(first, last).passed_bytes
    assert await _answer_in_the_end(client)


async def _stop(swarm: LinkedSwarm, client: SwarmClient, undisturbed: list[int]) -> None:
    """It is missed and waited for; when it goes on, so does the answer."""
    middle = swarm.nodes[1]
    async with _at(swarm, middle, client, Moment.FIRST_TOKEN) as answer:
        async with injected(Fault.STOP_NODE, swarm, middle):
            await asyncio.wait([answer], timeout=2 * SILENCE_SECONDS)
            assert not answer.done()
        await node_door(middle).release()
        assert await answer == undisturbed


async def _kill(swarm: LinkedSwarm, client: SwarmClient, undisturbed: list[int]) -> None:
    """It takes all its processes along, and another takes its layers."""
    middle = swarm.nodes[1]
    family = psutil.Process(middle.pid).children(recursive=True)
    assert len(family) == 2
    async with _at(swarm, middle, client, Moment.MID_DECODE) as answer:
        heir = await swarm.add(middle.span)  # not before, for it might be chosen
        async with injected(Fault.KILL_NODE, swarm, middle):
            assert await answer == undisturbed
    assert heir.link.passed_bytes
    assert not any(process.is_running() for process in family)

"""A hop's state is copied to another node while the session goes on, and that node takes its place, bit by bit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from dht.peer import Peer
from shim.types import ContextSpec
from swarm.node.copier import BLOCK_TOKENS
from swarm.node.node import SwarmNode
from swarm.node.sessions import Counts
from swarm.protocol import DATA_STREAM, pb
from tests.node.copying import bits, decode, prefill, reroute, understudy
from tests.node.harness import client_peer, config, hang_up, hear, say, session, slots_empty, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 2 * BLOCK_TOKENS + 200
PROMPT = [7 * index % 256 for index in range(BLOCK_TOKENS + 50)]
MORE = [3, 141, 59, 26]

Swarm = tuple[SwarmNode, SwarmNode, SwarmNode]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nodes(llama_untied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    """The entry, the exit, and one that holds the layers of both."""
    folder = tmp_path_factory.mktemp("understudy")

    def node(layers: str, *peers: str) -> SwarmNode:
        made = config(llama_untied_path, layers, folder, peers)
        contexts = (ContextSpec(4, LONG),)
        return SwarmNode(replace(made, model=replace(made.model, contexts=contexts)))

    async with node("0:3") as entry, node("3:6", *entry.addresses) as last, node("0:6", *entry.addresses) as wide:
        yield entry, last, wide


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(nodes: Swarm) -> AsyncIterator[Peer]:
    async with client_peer(*nodes) as peer:
        yield peer


@pytest_asyncio.fixture(loop_scope="module")
async def swarm(nodes: Swarm) -> AsyncIterator[Swarm]:
    """Afterwards nothing may be left of what the test did."""
    yield nodes
    await hang_up()
    for node in nodes:
        await until(partial(nothing_is_left, node))
        await until(partial(slots_empty, node))


def nothing_is_left(node: SwarmNode) -> bool:
    shared, journals = node.shared, node.shared.journals
    return (
        node.counts() == Counts()
        and node.service.open_streams == shared.queue == shared.copies == 0
        and journals.n_open == journals.used_bytes == journals.spilled_bytes == 0
    )


async def undisturbed(client: Peer, swarm: Swarm, more: list[int]) -> list[list[pb.RowSummary]]:
    async with session(client, *swarm[:2], context_tokens=LONG) as mine:
        return bits([await prefill(mine, PROMPT), *await decode(mine, len(PROMPT), more)])


@pytest.mark.parametrize("of", [0, 1])
async def test_an_understudy_goes_on_with_the_same_bits(swarm: Swarm, client: Peer, of: int) -> None:
    expected = await undisturbed(client, swarm, MORE)
    async with session(client, *swarm[:2], keep_journal=True, context_tokens=LONG) as mine:
        second = await understudy(mine, swarm[2], of)
        await second.copy()
        answers = [await prefill(mine, PROMPT)]
        assert (await second.copied(BLOCK_TOKENS)).position == BLOCK_TOKENS
        answers += await decode(mine, len(PROMPT), MORE[:2])
        held = len(PROMPT) + 2
        await second.copy(held)
        copied = await second.copied(held, done=True)
        assert (copied.position, copied.failure) == (held, "")
        assert copied.journal_first == (0 if of == 0 else held), "the exit feeds nobody"
        rerouted = await second.takes_over(held)
        assert rerouted.position == held
        answers += await decode(mine, held, MORE[2:])
        assert bits(answers) == expected


async def test_its_journal_feeds_a_new_successor(swarm: Swarm, client: Peer) -> None:
    expected = await undisturbed(client, swarm, MORE)
    async with session(client, *swarm[:2], keep_journal=True, context_tokens=LONG) as mine:
        second = await understudy(mine, swarm[2], 0)
        answers = [await prefill(mine, PROMPT), *await decode(mine, len(PROMPT), MORE[:2])]
        held = len(PROMPT) + 2
        await second.copy(held)
        await second.copied(held, done=True)
        await second.takes_over(held)
        await mine.control[1].close()
        await until(lambda: not swarm[1].shared.lives)
        mine.control[1] = await say(client, swarm[1], "glm-swarm/1/control")
        await mine.control[1].send(mine.opening(1))
        assert isinstance(await hear(mine.control[1]), pb.Opened)
        rerouted = await reroute(mine, held)
        assert [one.position for one in rerouted] == [held, 0]
        answers += await decode(mine, held, MORE[2:])
        assert bits(answers) == expected


async def test_an_understudy_takes_no_steps(swarm: Swarm, client: Peer) -> None:
    async with session(client, *swarm[:2], context_tokens=LONG) as mine:
        await understudy(mine, swarm[2], 0)
        data = await say(client, swarm[2], DATA_STREAM)
        await data.send(pb.Attach(session_id=mine.id, epoch=mine.epoch))
        error = await hear(data)
        assert isinstance(error, pb.Error) and error.code == pb.NOT_ALLOWED

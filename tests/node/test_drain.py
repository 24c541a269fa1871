"""A node that leaves: its clients hear of it at once, move what they can, and nothing new is taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from dht.peer import Peer
from dht.record import NodeState
from swarm.node.node import SwarmNode
from swarm.node.reporter import Silent
from swarm.node.sessions import Counts
from swarm.protocol import CONTROL_STREAM, STATE_STREAM, pb
from tests.node.conftest import Chain
from tests.node.copying import bits, decode, opening, prefill, understudy
from tests.node.harness import Session, client_peer, config, hear, say, session, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(30))
MORE = [3, 141, 59]


class Lines(Silent):
    """What the operator reads."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest_asyncio.fixture(loop_scope="module")
async def leaver(chain: Chain, llama_untied_path: Path, folder: Path, lines: Lines) -> AsyncIterator[SwarmNode]:
    """Another node with the entry's layers, that has five seconds to leave."""
    made = config(llama_untied_path, "0:3", folder, chain[0].addresses, drain_seconds=5.0)
    async with SwarmNode(replace(made, explain=False), lines) as node:
        lines.lines.clear()
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def peer(chain: Chain, leaver: SwarmNode) -> AsyncIterator[Peer]:
    async with client_peer(*chain, leaver) as made:
        yield made


async def draining_seconds(mine: Session, index: int) -> float:
    said = await hear(mine.control[index])
    assert isinstance(said, pb.Draining), said
    assert said.session_id == mine.id
    return said.seconds


async def test_a_session_moves_away_from_a_node_that_leaves(
    chain: Chain, leaver: SwarmNode, peer: Peer, lines: Lines
) -> None:
    entry, last = chain
    async with session(peer, *chain) as mine:
        expected = bits([await prefill(mine, PROMPT), *await decode(mine, len(PROMPT), MORE)])
    async with session(peer, leaver, last, keep_journal=True) as mine:
        answers = [await prefill(mine, PROMPT), *await decode(mine, len(PROMPT), MORE[:1])]
        draining = asyncio.create_task(leaver.drain())
        assert 4 < await draining_seconds(mine, 0) <= 5
        second = await understudy(mine, entry, 0)
        answers += await decode(mine, len(PROMPT) + 1, MORE[1:2])
        held = len(PROMPT) + 2
        await second.copy(held)
        assert (await second.copied(held, done=True)).journal_first == 0
        assert not draining.done()
        await second.takes_over(held)
        answers += await decode(mine, held, MORE[2:])
        assert bits(answers) == expected
        await asyncio.wait_for(draining, 20)
    assert leaver.counts() == Counts()
    assert lines.lines == [
        "draining: waiting up to 5 s for 1 running session",
        f"draining: layers 0:3 of a session are being moved to {entry.peer_id}",
        "draining: no running sessions left",
    ]


async def test_a_node_that_leaves_takes_nothing_new(chain: Chain, leaver: SwarmNode, peer: Peer) -> None:
    """Not even what it had promised: its understudies are ended at once, and their primaries told."""
    entry, last = chain
    async with session(peer, *chain) as mine, session(peer, leaver, last) as theirs:
        second = await understudy(mine, leaver, 0)
        await second.copy()
        assert (await second.copied()).failure == ""
        draining = asyncio.create_task(leaver.drain())
        await draining_seconds(theirs, 0)
        while isinstance(error := await hear(second.control), pb.Draining):
            pass
        assert isinstance(error, pb.Error) and error.code == pb.NODE_DRAINING
        assert "refused: the node takes nothing new" in (await second.copied(1)).failure
        for message, stream in (
            (opening(mine, 0), await say(peer, leaver, CONTROL_STREAM)),
            (
                pb.StateOffer(
                    session_id=theirs.id,
                    artifact_id=entry.manifest.artifact_id,
                    numerics_id=entry.shared.host.info.numerics_id,
                    run=pb.Layers(first=0, last=3),
                ),
                await say(peer, leaver, STATE_STREAM),
            ),
        ):
            await stream.send(message)
            error = await hear(stream)
            assert isinstance(error, pb.Error) and error.code == pb.NODE_DRAINING
        await prefill(theirs, PROMPT)
        await theirs.close()
        await asyncio.wait_for(draining, 20)


async def test_a_hop_that_is_gone_leaves_the_understudy_what_it_had(
    chain: Chain, leaver: SwarmNode, peer: Peer
) -> None:
    entry, last = chain
    async with session(peer, *chain) as mine:
        expected = bits([await prefill(mine, PROMPT), *await decode(mine, len(PROMPT), MORE)])
    async with session(peer, leaver, last, keep_journal=True) as mine:
        answers = [await prefill(mine, PROMPT)]
        second = await understudy(mine, entry, 0)
        held = len(PROMPT)
        await second.copy(held)
        await second.copied(held, done=True)
        answers += await decode(mine, held, MORE[:1])
        assert entry.service.open_streams == 2
        leaver._stop.set()
        await until(lambda: entry.service.open_streams == 1)
        rerouted = await second.takes_over(held + 1)
        assert (rerouted.position, rerouted.journal_first) == (held, 0)
        assert mine.data is not None
        await mine.data.send_step(mine.step(held, MORE[:1], replay=True))
        answers += await decode(mine, held + 1, MORE[1:])
        assert bits(answers) == expected


async def test_what_does_not_move_is_ended_in_the_end(chain: Chain, llama_untied_path: Path, folder: Path) -> None:
    made = config(llama_untied_path, "0:3", folder, chain[0].addresses, drain_seconds=0.5)
    async with SwarmNode(made) as node, client_peer(*chain, node) as peer, session(peer, node, chain[1]) as mine:
        await node.drain()
        assert node.state == NodeState.DRAINING
        assert 0 < await draining_seconds(mine, 0) <= 0.5
        node._stop.set()
        error = await hear(mine.control[0])
        assert isinstance(error, pb.Error) and error.code == pb.NODE_DRAINING
        await until(partial(_has_nothing, node))


def _has_nothing(node: SwarmNode) -> bool:
    return node.counts() == Counts() and node.service.open_streams == node.shared.copies == 0

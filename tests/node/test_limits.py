"""What one peer may take of real nodes, and what a real client makes of it: it waits, or goes to another node."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from dht.peer import Peer
from shim.types import ContextSpec
from swarm import NodeFull
from swarm.client.artifact_cache import Source
from swarm.client.info import InfoReader
from swarm.client.lasting import LastingSession
from swarm.client.steps import StepRequest, WantedRow
from swarm.ids import PeerId
from swarm.node.config import Limits, NodeConfig, PerMinute
from swarm.node.node import SwarmNode
from swarm.node.rates import Rate, Rates
from swarm.node.sessions import Counts
from swarm.protocol import CONTROL_STREAM, INFO_STREAM, WireError, pb
from tests.node.clients import patient_client
from tests.node.harness import Session, client_peer, config, hang_up, hear, say, session, until

CHUNK, CONTEXT = 64, 512


def limits(per_minute: int) -> Limits:
    """A minute for each peer and kind of request."""
    rate = PerMinute(per_minute, 1000)
    return Limits(tokens_in_flight_per_peer=2 * CHUNK, opens=rate, rows=rate, copies=rate, questions=rate, pieces=rate)


STRICT = limits(2)
QUICK = limits(60)  # who has had them all waits for a second


def limited(model: Path, folder: Path, peers: Sequence[str] = ()) -> NodeConfig:
    made = config(model, "0:6", folder, peers)
    slots = (ContextSpec(4, CONTEXT),)
    return replace(made, limits=STRICT, model=replace(made.model, contexts=slots, chunk_tokens=CHUNK))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("limits")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def twins(llama_untied_path: Path, folder: Path) -> AsyncIterator[tuple[SwarmNode, SwarmNode]]:
    """Two nodes that serve the whole model each."""
    async with (
        SwarmNode(limited(llama_untied_path, folder)) as one,
        SwarmNode(limited(llama_untied_path, folder, one.addresses)) as other,
    ):
        yield one, other


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(twins: tuple[SwarmNode, SwarmNode]) -> AsyncIterator[tuple[SwarmNode, SwarmNode]]:
    yield twins
    await hang_up()
    for node in twins:
        await until(lambda node=node: node.counts() == Counts() and node.shared.load.total == 0)


@contextmanager
def quick(*nodes: SwarmNode) -> Iterator[Callable[[], None]]:
    """Other limits for a while, by a clock that stands until the function given is called."""
    before = [node.shared.rates for node in nodes]
    now = 0.0

    def go_on() -> None:
        nonlocal now
        now += 60

    for node in nodes:
        node.shared.rates = Rates.of(QUICK, lambda: now)
    try:
        yield go_on
    finally:
        for node, rates in zip(nodes, before, strict=True):
            node.shared.rates = rates


def refusals(nodes: Sequence[SwarmNode]) -> int:
    return sum(node.shared.counters["limit_reached"] for node in nodes)


def use_up(rate: Rate, peer: str) -> None:
    while True:
        try:
            rate.take(PeerId(peer))
        except WireError:
            return


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_too_many_opens_are_refused_with_a_time_to_come_back(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    node = nodes[0]
    async with client_peer(node) as one, client_peer(node) as other:
        use_up(node.shared.rates.opens, one.peer_id)
        before = node.shared.counters["limit_reached"]
        refusal = await opening(one, node)
        assert isinstance(refusal, pb.Error)
        assert refusal.code == pb.LIMIT_REACHED
        assert 0 < refusal.retry_after_seconds <= 30
        assert "sessions a minute: at most 2 for one peer, again in" in refusal.message
        assert node.shared.counters["limit_reached"] == before + 1
        assert isinstance(await opening(other, node), pb.Opened), "others are not held to it"


async def test_too_many_copies_are_refused_and_the_session_goes_on(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    """Each makes the node reach out to an address that its client has chosen."""
    node = nodes[0]
    async with client_peer(node) as one, session(one, node) as mine:

        async def ordered(understudy: str) -> str:
            run = pb.Layers(first=0, last=6)
            order = pb.CopyState(session_id=mine.id, understudy=pb.Neighbour(peer_id=understudy), run=run)
            await mine.control[0].send(order)
            while not isinstance(said := await hear(mine.control[0]), pb.Copied):
                assert isinstance(said, pb.Pong), said
            return said.failure

        for _ in range(2):
            assert "can't be reached" in await ordered(one.peer_id)
        assert "copies of sessions a minute: at most 2 for one peer, again in" in await ordered(one.peer_id)
        await mine.compute(0, [5])


async def opening(peer: Peer, node: SwarmNode) -> object:
    control = await say(peer, node, CONTROL_STREAM)
    await control.send(Session(peer, (node,)).opening(0))
    return await hear(control)


async def test_questions_and_pieces_are_counted_apart(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    node = nodes[0]
    async with client_peer(node) as peer:
        use_up(node.shared.rates.questions, peer.peer_id)
        stream = await say(peer, node, INFO_STREAM)
        await stream.send(pb.ArtifactRequest(artifact_id=node.manifest.artifact_id, piece=pb.MANIFEST))
        assert isinstance(await hear(stream), pb.ArtifactPart)
        stream = await say(peer, node, INFO_STREAM)
        await stream.send(pb.DescribeRequest())
        refusal = await hear(stream)
        assert isinstance(refusal, pb.Error)
        assert refusal.code == pb.LIMIT_REACHED


async def test_a_client_goes_to_another_node_and_shuns_nobody(nodes: tuple[SwarmNode, SwarmNode], folder: Path) -> None:
    said: list[str] = []
    async with patient_client(nodes[0], folder, said) as client:
        for node in nodes:  # one of them gives the tokenizer, one the session
            rates = node.shared.rates
            use_up(rates.pieces if node is nodes[0] else rates.opens, client.peer_id)
        async with await client.open_session(128) as session:
            assert [place.peer_id for place in session.places] == [nodes[0].peer_id]
        assert client._avoided.now() == frozenset()
        reader = InfoReader(client._network, client.config.timeouts)
        use_up(nodes[0].shared.rates.questions, client.peer_id)
        with pytest.raises(
            NodeFull, match=r"takes no more from this client: questions a minute: at most 2 .*try again in"
        ):
            await reader.describe(Source(PeerId(nodes[0].peer_id), nodes[0].addresses))
    assert not [line for line in said if "waiting" in line]


async def test_a_client_waits_when_there_is_nobody_else(nodes: tuple[SwarmNode, SwarmNode], folder: Path) -> None:
    said: list[str] = []
    async with patient_client(nodes[0], folder, said) as client:
        await client.artifact()
        with quick(*nodes) as go_on:
            for node in nodes:
                use_up(node.shared.rates.opens, client.peer_id)
            before = refusals(nodes)
            opening = asyncio.create_task(client.open_session(128))
            await until(lambda: bool(said))
            go_on()
            async with await opening:
                pass
            assert before < refusals(nodes) <= before + 2, "it comes back when it was told to, not before"
        assert client._avoided.now() == frozenset()
    assert "takes no more from this client: sessions a minute: at most 60 for one peer, again in 1.0 s" in said[0]


async def test_rows_wait_and_nothing_is_lost(nodes: tuple[SwarmNode, SwarmNode], folder: Path) -> None:
    async with patient_client(nodes[0], folder, []) as client, await client.open_session(128) as session:
        await prefill(session)
        row = await session.fetch_row(9)
        with quick(*nodes) as go_on:
            for node in nodes:
                use_up(node.shared.rates.rows, client.peer_id)
            before = refusals(nodes)
            fetching = asyncio.create_task(session.fetch_row(9))
            await until(lambda: refusals(nodes) == before + 1)
            go_on()
            assert (row == await fetching).all()
            assert refusals(nodes) == before + 1
        assert not session.recoveries


async def prefill(session: LastingSession) -> None:
    await session.step(StepRequest(0, tuple(range(10)), pb.PREFILL, WantedRow()))


class Long(Session):
    """In chunks that are large enough to be counted."""

    def opening(self, index: int) -> pb.Open:
        asked = super().opening(index)
        asked.context_tokens, asked.chunk_tokens = CONTEXT, CHUNK
        return asked


@asynccontextmanager
async def long_session(peer: Peer, node: SwarmNode) -> AsyncIterator[Session]:
    made = Long(peer, (node,))
    try:
        await made.open()
        await made.attach()
        yield made
    finally:
        await made.close()


async def test_what_is_over_the_limit_of_waiting_tokens_waits_outside(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    node = nodes[0]
    async with client_peer(node) as peer, long_session(peer, node) as one, long_session(peer, node) as other:
        with stopped(node):
            for chunk in range(4):
                await send_chunk(one, chunk)
            await until(lambda: node.shared.load.of(PeerId(peer.peer_id)) == 2 * CHUNK)
            await send_chunk(other, 0)
            await send_row(other, 0)
            live = node.shared.lives[other.id]  # type: ignore[index]
            await until(lambda: len(node.shared.load._waiting) == 2)
            assert (live.in_flight, node.shared.load.total) == (0, 2 * CHUNK), "the peer has as much as it may"
        answers = [await answer(one) for _ in range(4)]
        assert [said.position for said in answers] == [CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK]
        assert [(await answer(other)).position for _ in range(2)] == [CHUNK, 1]


async def send_chunk(of: Session, index: int) -> None:
    assert of.data is not None
    await of.data.send_step(of.step(index * CHUNK, [token % 250 for token in range(CHUNK)]))


async def send_row(of: Session, start: int) -> None:
    assert of.data is not None
    await of.data.send_step(of.step(start, [7]))


async def answer(of: Session) -> pb.Answer:
    while not isinstance(said := await hear(of.control[-1]), pb.Answer):
        assert isinstance(said, pb.Pong), said
    return said


@contextmanager
def stopped(node: SwarmNode) -> Iterator[None]:
    """The engine's process stands still."""
    pid = node.shared.host.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)

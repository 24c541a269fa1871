"""A hop that feeds another successor: over real nodes, with a client made of bare frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from dht.peer import Peer
from swarm.node.node import SwarmNode
from swarm.protocol import CONTROL_STREAM, DATA_STREAM, FrameStream, pb
from swarm.protocol.limits import first_step
from tests.node.conftest import Chain
from tests.node.harness import Session, client_peer, config, hear, neighbour, say, session, slots_empty, until
from tests.node.test_journal import unnamed_files

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(40, 56))
MORE = [7, 8, 9]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def heir(nodes: Chain, llama_untied_path: Path, folder: Path) -> AsyncIterator[SwarmNode]:
    """Another node with the layers of the last one."""
    async with SwarmNode(config(llama_untied_path, "3:6", folder, nodes[0].addresses)) as node:
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def other_peer(chain: Chain, heir: SwarmNode) -> AsyncIterator[Peer]:
    async with client_peer(*chain, heir) as peer:
        yield peer
    await until(partial(slots_empty, heir))
    assert chain[0].shared.journals.n_open == chain[0].shared.journals.used_bytes == 0


async def computed(mine: Session) -> list[pb.Answer]:
    """A chunk and three rows, each answer."""
    answers = [await mine.compute(0, PROMPT)]
    for at, token in enumerate(MORE, len(PROMPT)):
        answers.append(await mine.compute(at, [token]))
    return answers


def rerouted(mine: Session, entry_to: SwarmNode, keep: int, first: int) -> pb.Reroute:
    return pb.Reroute(
        session_id=mine.id,
        epoch=2,
        predecessor=pb.Neighbour(peer_id=mine.peer.peer_id),
        successor=neighbour(entry_to),
        successor_position=first,
        push_journal=True,
        keep_tokens=keep,
    )


async def reopened(mine: Session, heir: SwarmNode) -> FrameStream:
    """The session at the heir, under the second epoch."""
    mine.epoch, mine.nodes = 2, (mine.nodes[0], heir)
    control = await say(mine.peer, heir, CONTROL_STREAM)
    await control.send(mine.opening(1))
    assert isinstance(await hear(control), pb.Opened)
    return control


async def test_a_new_successor_gets_what_the_old_one_had(chain: Chain, heir: SwarmNode, other_peer: Peer) -> None:
    async with session(other_peer, *chain, keep_journal=True) as mine:
        before = await computed(mine)
        assert chain[0].shared.journals.used_bytes == (len(PROMPT) + len(MORE)) * 128 * 4
        control = await reopened(mine, heir)
        keep = len(PROMPT) + len(MORE) - 1
        await mine.control[0].send(rerouted(mine, heir, keep, 0))
        said = await hear(mine.control[0])
        assert isinstance(said, pb.Rerouted), said
        assert (said.epoch, said.position, said.journal_first) == (2, keep, 0)
        await until(lambda: [one.position for one in heir.shared.table] == [keep])
        mine.control[1] = control
        mine.number = first_step(-1)
        await mine.attach()
        again = await mine.compute(keep, MORE[-1:])
        assert again.rows == before[-1].rows
        assert [timing.replay_us > 0 for timing in again.timings] == [False, True]


async def test_without_a_journal_the_hop_is_fed_again(chain: Chain, heir: SwarmNode, other_peer: Peer) -> None:
    """What is replayed through it goes on to a successor that lacks it, and is not answered."""
    async with session(other_peer, *chain) as mine:
        before = await computed(mine)
        control = await reopened(mine, heir)
        keep = len(PROMPT) + len(MORE) - 1
        await mine.control[0].send(rerouted(mine, heir, keep, 0))
        said = await hear(mine.control[0])
        assert isinstance(said, pb.Error) and said.code == pb.JOURNAL_MISSING and said.position == keep
        mine.control[1] = control
        mine.number = first_step(-1)
        data = await mine.attach()
        await data.send_step(mine.step(0, PROMPT, replay=True))
        await data.send_step(mine.step(len(PROMPT), MORE[:-1], kind=pb.DECODE, replay=True))
        again = await mine.compute(keep, MORE[-1:])
        assert again.rows == before[-1].rows


async def test_a_hop_does_not_send_on_what_its_successor_holds(chain: Chain, other_peer: Peer) -> None:
    entry, last = chain
    async with session(other_peer, *chain) as mine:
        before = await computed(mine)
        keep = len(PROMPT) + len(MORE) - 1
        exit_route = pb.Reroute(session_id=mine.id, epoch=2, predecessor=neighbour(entry), keep_tokens=keep)
        await mine.control[1].send(exit_route)
        assert isinstance(await hear(mine.control[1]), pb.Rerouted)
        await mine.control[0].close()
        await until(lambda: not entry.shared.lives)
        mine.epoch = 2
        opening = mine.opening(0)
        opening.successor_position = keep
        mine.control[0] = await say(other_peer, entry, CONTROL_STREAM)
        await mine.control[0].send(opening)
        assert isinstance(await hear(mine.control[0]), pb.Opened)
        mine.number = first_step(-1)
        data = await mine.attach()
        await data.send_step(mine.step(0, PROMPT, replay=True))
        await data.send_step(mine.step(len(PROMPT), MORE[:-1], kind=pb.DECODE, replay=True))
        await until(lambda: [one.position for one in entry.shared.table] == [keep])
        last_step = next(iter(last.shared.table)).last_step
        assert last_step == 0, "nothing came in this epoch"
        again = await mine.compute(keep, MORE[-1:])
        assert again.rows == before[-1].rows


async def test_what_does_not_fit_the_memory_goes_to_a_file(
    chain: Chain, heir: SwarmNode, other_peer: Peer, tmp_path: Path
) -> None:
    store = chain[0].shared.journals
    memory, folder = store.memory_bytes, store.folder
    store.memory_bytes, store.folder = 17 * 128 * 4, tmp_path
    try:
        async with session(other_peer, *chain, keep_journal=True) as mine:
            before = await computed(mine)
            assert unnamed_files(tmp_path) == 1
            control = await reopened(mine, heir)
            keep = len(PROMPT) + len(MORE) - 1
            await mine.control[0].send(rerouted(mine, heir, keep, 0))
            assert isinstance(await hear(mine.control[0]), pb.Rerouted)
            mine.control[1] = control
            mine.number = first_step(-1)
            await mine.attach()
            assert (await mine.compute(keep, MORE[-1:])).rows == before[-1].rows
        await until(lambda: unnamed_files(tmp_path) == 0)
    finally:
        store.memory_bytes, store.folder = memory, folder


# --- a successor that says nothing


async def test_a_hop_tells_its_predecessor_that_it_lives(chain: Chain, other_peer: Peer) -> None:
    async with session(other_peer, *chain) as mine:
        assert mine.data is not None
        assert isinstance(await hear(mine.data), pb.Pong)


async def test_a_silent_successor_is_reported(llama_untied_path: Path, folder: Path) -> None:
    config_ = config(llama_untied_path, "0:3", folder, silence_seconds=0.5)
    async with SwarmNode(config_) as node, client_peer(node) as peer:
        taken = asyncio.Event()

        async def mute(_peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = FrameStream(reader, writer)
            try:
                assert isinstance(await stream.receive(), pb.Attach)
                await stream.send(pb.Attached(epoch=1))
                taken.set()
                while await stream.receive() is not None:
                    pass
            finally:
                await stream.close()

        await peer.serve_stream(DATA_STREAM, mute)
        mine = Session(peer, (node, node))
        opening = mine.opening(0)
        opening.successor.CopyFrom(pb.Neighbour(peer_id=peer.peer_id))
        control = await say(peer, node, CONTROL_STREAM)
        await control.send(opening)
        assert isinstance(await hear(control), pb.Opened)
        await (await mine.attach()).send_step(mine.step(0, PROMPT))
        failed = await hear(control)
        assert taken.is_set()
        assert isinstance(failed, pb.LinkFailed), failed
        assert failed.successor == peer.peer_id and "silent for 0.5 s" in failed.cause

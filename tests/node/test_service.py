"""Real nodes on real sockets, and what peers may and may not do to them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from dht.peer import Peer
from dht.record import NodeState
from shim.types import ContextSpec
from swarm.errors import ClockSkew
from swarm.node.config import Limits
from swarm.node.node import SwarmNode
from swarm.node.sessions import Counts
from swarm.protocol import CONTROL_STREAM, DATA_STREAM, INFO_STREAM, Body, FrameStream, PartJoiner, pb
from tests.node.harness import (
    CHUNK,
    CONTEXT,
    Session,
    client_peer,
    config,
    ended,
    hear,
    neighbour,
    say,
    session,
    slots_empty,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

Chain = tuple[SwarmNode, SwarmNode]
PROMPT = list(range(10))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stranger(nodes: Chain) -> AsyncIterator[Peer]:
    """A third peer that no session names."""
    async with client_peer(*nodes) as peer:
        yield peer


async def refusal(stream: FrameStream) -> pb.Error:
    """The Error that a stream gets; nothing but signs of life may come before, and the stream ends after it."""
    while isinstance(error := await hear(stream), pb.Pong):
        pass
    assert isinstance(error, pb.Error), error
    assert await ended(stream)
    return error


async def refused_open(peer: Peer, node: SwarmNode, opening: pb.Open) -> pb.Error:
    stream = await say(peer, node, CONTROL_STREAM)
    await stream.send(opening)
    return await refusal(stream)


# --- what works


async def test_steps_travel_from_hop_to_hop(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        answer = await mine.compute(0, PROMPT)
        assert answer.position == len(PROMPT)
        assert [row.position for row in answer.rows] == [len(PROMPT) - 1]
        assert [timing.hop_index for timing in answer.timings] == [0, 1]
        for timing in answer.timings:
            assert timing.received_us < timing.sent_us
            assert timing.batch_rows == len(PROMPT) and timing.batch_sessions == 1
            assert timing.compute_us > 0
        for node in chain:
            assert node.counts() == Counts(sessions=1, slots=1, kv_tokens=len(PROMPT))


async def test_a_chunk_without_wanted_rows_is_acknowledged(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        assert mine.data is not None
        for start in range(0, 3 * CHUNK, CHUNK):
            step = mine.step(start, list(range(CHUNK)))
            step.ClearField("output")
            await mine.data.send_step(step)
        for end in range(CHUNK, 4 * CHUNK, CHUNK):
            answer = await hear(mine.control[-1])
            assert isinstance(answer, pb.Answer)
            assert answer.position == end and not answer.rows


async def test_a_replayed_step_is_not_answered(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        assert mine.data is not None
        await mine.data.send_step(mine.step(0, PROMPT, replay=True))
        answer = await mine.compute(len(PROMPT), [1])
        assert answer.step == 2
        replays = [timing.replay_us for timing in answer.timings]
        assert len(replays) == len(chain) and min(replays) > 0, "each hop tells what the replay took"
        again = await mine.compute(len(PROMPT) + 1, [2])
        assert [timing.replay_us for timing in again.timings] == [0, 0], "once"


async def test_every_hop_reports_when_asked(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT, output=pb.OutputRequest(report_hops=True))
        done = await hear(mine.control[0])
        assert isinstance(done, pb.StepDone)
        assert (done.step, done.position) == (1, len(PROMPT))


async def test_an_earlier_start_drops_what_is_above(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        first = await mine.compute(0, PROMPT)
        await mine.compute(len(PROMPT), [5])
        again = await mine.compute(len(PROMPT) - 1, PROMPT[-1:])
        assert again.position == len(PROMPT)
        assert list(again.rows[0].top_ids) == list(first.rows[0].top_ids)


async def test_sessions_side_by_side_share_calls_and_keep_their_results(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as a, session(client, *chain) as b, session(client, *chain) as c:
        all_of_them = (a, b, c)
        alone = [await one.compute(0, PROMPT[number:]) for number, one in enumerate(all_of_them)]
        expected = [await one.compute(len(PROMPT) - number, [7]) for number, one in enumerate(all_of_them)]
        together = await asyncio.gather(
            *(one.compute(len(PROMPT) - number, [7]) for number, one in enumerate(all_of_them))
        )
        for before, after in zip(expected, together, strict=True):
            assert list(before.rows[0].top_logits) == list(after.rows[0].top_logits)
        assert len({tuple(answer.rows[0].top_logits) for answer in alone}) == 3


async def test_a_run_inside_the_span(chain: Chain, client: Peer) -> None:
    """The chain may enter a span in its middle and leave it before its end."""
    entry, last = chain
    opening = Session(client, chain).opening(0)
    opening.run.last = 2
    stream = await say(client, entry, CONTROL_STREAM)
    await stream.send(opening)
    assert isinstance(await hear(stream), pb.Opened)
    opening = Session(client, chain).opening(1)
    opening.run.first = 4
    stream = await say(client, last, CONTROL_STREAM)
    await stream.send(opening)
    assert isinstance(await hear(stream), pb.Opened)


async def test_the_whole_row_is_kept_until_the_next_step(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        answer = await mine.compute(0, PROMPT)
        control = mine.control[-1]
        await control.send(pb.RowRequest(session_id=mine.id, position=len(PROMPT) - 1))
        joiner = PartJoiner(1 << 20)
        data = None
        while data is None:
            part = await hear(control)
            assert isinstance(part, pb.Row)
            data = joiner.add(part)
        row = np.frombuffer(data, "<f4")
        assert row.size == chain[1].manifest.n_vocab
        np.testing.assert_array_equal(row[list(answer.rows[0].top_ids)], answer.rows[0].top_logits)
        await mine.compute(len(PROMPT), [1], output=pb.OutputRequest(temperature=1))
        await control.send(pb.RowRequest(session_id=mine.id, position=len(PROMPT) - 1))
        error = await hear(control)
        assert isinstance(error, pb.Error) and error.code == pb.GAP


async def test_pings_are_answered_while_the_engine_is_stuck(chain: Chain, client: Peer) -> None:
    entry = chain[0]
    assert entry.shared.host.pid is not None
    async with session(client, *chain) as mine:
        assert mine.data is not None
        os.kill(entry.shared.host.pid, signal.SIGSTOP)
        try:
            await mine.data.send_step(mine.step(0, PROMPT))
            await until(lambda: entry.shared.queue == 1)
            await mine.control[0].send(pb.Ping(nonce=77))
            pong = await hear(mine.control[0])
            assert isinstance(pong, pb.Pong) and pong.nonce == 77
            assert (pong.position, pong.queue) == (0, 1)
        finally:
            os.kill(entry.shared.host.pid, signal.SIGCONT)
        answer = await hear(mine.control[-1])
        assert isinstance(answer, pb.Answer)
        assert answer.timings[0].queue_us + answer.timings[0].compute_us > 0


# --- who may do what


async def position(node: SwarmNode, mine: Session) -> tuple[int, int]:
    one = node.shared.table.get(mine.id)
    assert one is not None
    return one.position, one.last_step


async def test_a_third_peer_can_not_attach(chain: Chain, client: Peer, stranger: Peer) -> None:
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)
        for node in chain:
            before, intruders = await position(node, mine), node.shared.counters["intruders"]
            stream = await say(stranger, node, DATA_STREAM)
            await stream.send(pb.Attach(session_id=mine.id, epoch=1))
            assert (await refusal(stream)).code == pb.NOT_ALLOWED
            assert node.shared.counters["intruders"] == intruders + 1
            assert await position(node, mine) == before
        await mine.compute(len(PROMPT), [1])


async def test_a_third_peer_can_not_replay_a_recorded_step(chain: Chain, client: Peer, stranger: Peer) -> None:
    async with session(client, *chain) as mine:
        recorded = mine.step(0, PROMPT)
        assert mine.data is not None
        await mine.data.send_step(recorded)
        first = await hear(mine.control[-1])
        assert isinstance(first, pb.Answer)
        newer = pb.Step()
        newer.CopyFrom(recorded)
        newer.step = 99
        for replayed in (recorded, newer):
            before = await position(chain[0], mine)
            stream = await say(stranger, chain[0], DATA_STREAM)
            await stream.send_step(replayed)
            assert (await refusal(stream)).code == pb.NOT_ALLOWED
            assert await position(chain[0], mine) == before
        again = await mine.compute(0, PROMPT)
        assert list(again.rows[0].top_logits) == list(first.rows[0].top_logits)


@pytest.mark.parametrize("kind", ["close", "reroute", "row", "ping"])
async def test_a_third_peer_can_not_control(chain: Chain, client: Peer, stranger: Peer, kind: str) -> None:
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)
        me = pb.Neighbour(peer_id=stranger.peer_id)
        messages: dict[str, Body] = {
            "close": pb.Close(session_id=mine.id),
            "reroute": pb.Reroute(session_id=mine.id, epoch=2, predecessor=me),
            "row": pb.RowRequest(session_id=mine.id, position=len(PROMPT) - 1),
            "ping": pb.Ping(nonce=1),
        }
        stream = await say(stranger, chain[1], CONTROL_STREAM)
        await stream.send(messages[kind])
        assert (await refusal(stream)).code == pb.NOT_ALLOWED
        await mine.compute(len(PROMPT), [1])


async def test_a_third_peer_can_not_open_an_open_session(chain: Chain, client: Peer, stranger: Peer) -> None:
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)
        thief = Session(stranger, chain, id=mine.id, epoch=5)
        assert (await refused_open(stranger, chain[0], thief.opening(0))).code == pb.NOT_ALLOWED
        await mine.compute(len(PROMPT), [1])


async def test_a_stream_belongs_to_one_session(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine, session(client, *chain) as other:
        await other.compute(0, PROMPT)
        assert mine.data is not None
        before = await position(chain[0], other)
        await mine.data.send_step(other.step(0, [1, 2, 3]))
        assert (await refusal(mine.data)).code == pb.NOT_ALLOWED
        assert await position(chain[0], other) == before
        await mine.control[0].send(pb.Close(session_id=other.id))
        assert (await refusal(mine.control[0])).code == pb.NOT_ALLOWED
        await other.compute(len(PROMPT), [1])


async def test_a_late_step_changes_nothing(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        assert mine.data is not None
        late = mine.step(0, [3])
        mine.number = 0
        await mine.compute(0, PROMPT)
        stale = chain[0].shared.counters["stale_steps"]
        await mine.data.send_step(late)
        answer = await mine.compute(len(PROMPT), [1])
        assert answer.step == 2 and answer.position == len(PROMPT) + 1
        assert chain[0].shared.counters["stale_steps"] == stale + 1


async def test_the_opener_may_come_back_under_a_higher_epoch(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        again = Session(client, chain, id=mine.id, epoch=1)
        assert (await refused_open(client, chain[0], again.opening(0))).code == pb.NOT_ALLOWED
        again.epoch = 2
        await again.open()
        await again.attach()
        assert (await refusal(mine.control[0])).code == pb.STALE_EPOCH
        await again.compute(0, PROMPT)
        await again.close()


# --- re-routing


async def test_a_new_route_keeps_what_is_held(chain: Chain, client: Peer) -> None:
    entry, last = chain
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)
        me = pb.Neighbour(peer_id=client.peer_id)
        for control, node, before, after in (
            (mine.control[0], entry, me, neighbour(last)),
            (mine.control[1], last, neighbour(entry), None),
        ):
            route = pb.Reroute(session_id=mine.id, epoch=2, predecessor=before, successor=after)
            route.keep_tokens = len(PROMPT)
            await control.send(route)
            rerouted = await hear(control)
            assert isinstance(rerouted, pb.Rerouted), (node, rerouted)
            assert (rerouted.epoch, rerouted.position, rerouted.journal_first) == (2, len(PROMPT), len(PROMPT))
        assert mine.data is not None and await ended(mine.data), "the stream of the epoch before is closed"
        stream = await say(client, entry, DATA_STREAM)
        await stream.send(pb.Attach(session_id=mine.id, epoch=1))
        assert (await refusal(stream)).code == pb.STALE_EPOCH
        mine.epoch, mine.number = 2, 0
        await mine.attach()
        assert (await mine.compute(len(PROMPT), [1])).epoch == 2


async def test_without_a_journal_a_replay_is_refused(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)
        reroute = pb.Reroute(session_id=mine.id, epoch=2, push_journal=True, successor=neighbour(chain[1]))
        reroute.keep_tokens = len(PROMPT)
        reroute.predecessor.peer_id = client.peer_id
        await mine.control[0].send(reroute)
        error = await hear(mine.control[0])
        assert isinstance(error, pb.Error) and error.code == pb.JOURNAL_MISSING
        assert error.position == len(PROMPT)
        await mine.control[0].send(reroute)
        error = await hear(mine.control[0])
        assert isinstance(error, pb.Error) and error.code == pb.STALE_EPOCH


async def test_a_successor_that_is_not_there_is_reported(chain: Chain, client: Peer, stranger: Peer) -> None:
    mine = Session(client, chain)
    opening = mine.opening(0)
    opening.successor.CopyFrom(pb.Neighbour(peer_id=stranger.peer_id, addresses=["/ip4/127.0.0.1/tcp/9"]))
    control = await say(client, chain[0], CONTROL_STREAM)
    await control.send(opening)
    assert isinstance(await hear(control), pb.Opened)
    data = await mine.attach()
    await data.send_step(mine.step(0, PROMPT))
    failed = await hear(control)
    assert isinstance(failed, pb.LinkFailed)
    assert failed.successor == stranger.peer_id and failed.cause
    await control.send(pb.Ping(nonce=1))
    assert isinstance(await hear(control), pb.Pong), "the session goes on"
    await mine.close()


async def test_a_successor_that_lets_go_is_reported_at_once(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)
        await mine.control[1].close()
        failed = await hear(mine.control[0])
        assert isinstance(failed, pb.LinkFailed)
        assert failed.successor == chain[1].peer_id


# --- what makes no sense


def raw(data: bytes) -> Callable[[FrameStream], Awaitable[None]]:
    async def send(stream: FrameStream) -> None:
        stream._writer.write(data)
        await stream._writer.drain()

    return send


GARBAGE = {
    "garbage": (b"\x00\x00\x00\x08" + b"\xff" * 8, pb.MALFORMED),
    "oversize": (b"\x7f\xff\xff\xff", pb.TOO_LARGE),
    "empty": (b"\x00\x00\x00\x00", pb.MALFORMED),
    "other version": (b"\x00\x00\x00\x04\x08\x09\x12\x00", pb.VERSION_MISMATCH),
    "no body": (b"\x00\x00\x00\x02\x08\x01", pb.MALFORMED),
}


@pytest.mark.parametrize("protocol", [INFO_STREAM, CONTROL_STREAM, DATA_STREAM])
@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_is_refused_and_harms_nobody(
    chain: Chain, client: Peer, stranger: Peer, protocol: str, kind: str
) -> None:
    data, code = GARBAGE[kind]
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)
        stream = await say(stranger, chain[0], protocol)
        await raw(data)(stream)
        assert (await refusal(stream)).code == code
        await mine.compute(len(PROMPT), [1])


async def test_garbage_on_an_attached_stream_costs_the_stream(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)
        assert mine.data is not None
        await raw(GARBAGE["garbage"][0])(mine.data)
        assert (await refusal(mine.data)).code == pb.MALFORMED
        await mine.data.close()
        await mine.attach()
        await mine.compute(len(PROMPT), [1])


async def test_garbage_on_a_control_stream_costs_the_session(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        await raw(GARBAGE["garbage"][0])(mine.control[0])
        assert (await refusal(mine.control[0])).code == pb.MALFORMED
        await until(lambda: chain[0].counts() == Counts())


BAD_STEPS: dict[str, tuple[int, list[int], dict[str, object], int]] = {
    "gap": (5, [1], {}, pb.GAP),
    "too many rows": (0, [1] * (CHUNK + 1), {}, pb.TOO_LARGE),
    "unknown token": (0, [1 << 20], {}, pb.MALFORMED),
    "unknown id": (0, [1], {"output": pb.OutputRequest(ids=[1 << 20])}, pb.MALFORMED),
}


@pytest.mark.parametrize("kind", BAD_STEPS)
async def test_a_bad_step_is_refused_and_the_session_goes_on(chain: Chain, client: Peer, kind: str) -> None:
    start, tokens, changes, code = BAD_STEPS[kind]
    async with session(client, *chain) as mine:
        assert mine.data is not None
        await mine.data.send_step(mine.step(start, tokens, **changes))
        hop = 1 if kind == "unknown id" else 0
        error = await hear(mine.control[hop])
        assert isinstance(error, pb.Error)
        assert (error.code, error.session_id, error.step) == (code, mine.id, 1)
        await mine.compute(0, PROMPT)


async def test_a_session_ends_where_its_context_ends(chain: Chain, client: Peer) -> None:
    async with session(client, *chain) as mine:
        for start in range(0, CONTEXT, CHUNK):
            await mine.compute(start, [1] * CHUNK)
        assert mine.data is not None
        await mine.data.send_step(mine.step(CONTEXT, [1]))
        error = await hear(mine.control[0])
        assert isinstance(error, pb.Error) and error.code == pb.CONTEXT_FULL


OPENINGS: dict[str, tuple[pb.Open, int]] = {
    "another artifact": (pb.Open(artifact_id="0" * 64), pb.WRONG_ARTIFACT),
    "outside the span": (pb.Open(run=pb.Layers(first=0, last=4)), pb.ILLEGAL_RANGE),
    "other numerics": (pb.Open(numerics_id="other/avx9/f16"), pb.NUMERICS_MISMATCH),
    "large chunks": (pb.Open(chunk_tokens=CHUNK + 1), pb.TOO_LARGE),
    "long context": (pb.Open(context_tokens=100_000), pb.CONTEXT_FULL),
}


@pytest.mark.parametrize("kind", OPENINGS)
async def test_what_is_not_served_is_refused(chain: Chain, client: Peer, kind: str) -> None:
    changes, code = OPENINGS[kind]
    opening = Session(client, chain).opening(0)
    opening.MergeFrom(changes)
    error = await refused_open(client, chain[0], opening)
    assert error.code == code
    if kind in ("another artifact", "other numerics"):
        assert error.ours and error.theirs


@pytest.mark.parametrize("hop", [0, 1])
async def test_only_the_exit_has_no_successor(chain: Chain, client: Peer, hop: int) -> None:
    opening = Session(client, chain).opening(hop)
    if hop:
        opening.successor.CopyFrom(neighbour(chain[0]))
    else:
        opening.ClearField("successor")
    assert (await refused_open(client, chain[hop], opening)).code == pb.ILLEGAL_RANGE


# --- how it ends


async def test_a_dropped_control_stream_frees_the_slot_with_steps_under_way(chain: Chain, client: Peer) -> None:
    entry = chain[0]
    pid = entry.shared.host.pid
    assert pid is not None
    async with session(client, *chain) as mine:
        assert mine.data is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            for start in range(0, 3 * CHUNK, CHUNK):
                await mine.data.send_step(mine.step(start, [1] * CHUNK))
            await until(lambda: entry.shared.queue == 3)
            await mine.control[0].close()
            await until(lambda: entry.counts() == Counts())
            assert entry.shared.queue == 1, "the call under way can't be taken back"
            async with session(client, *chain) as other:
                os.kill(pid, signal.SIGCONT)
                await other.compute(0, PROMPT)
        finally:
            os.kill(pid, signal.SIGCONT)


def has_nothing(node: SwarmNode) -> bool:
    return node.counts() == Counts()


async def test_a_client_that_dies_leaves_nothing(chain: Chain) -> None:
    async with client_peer(*chain) as peer:
        mine = await Session(peer, chain).open()
        await mine.attach()
        await mine.compute(0, PROMPT)
        psutil.Process(peer.p2p.pid).kill()
        for node in chain:
            await until(partial(has_nothing, node))
        await mine.close()


async def test_a_full_node_says_so_at_once(chain: Chain, client: Peer) -> None:
    entry = chain[0]
    opened = []
    for _ in range(5):
        control = await say(client, entry, CONTROL_STREAM)
        await control.send(Session(client, chain).opening(0))
        assert isinstance(await hear(control), pb.Opened)
        opened.append(control)
    error = await refused_open(client, entry, Session(client, chain).opening(0))
    assert error.code == pb.NODE_FULL and error.retry_after_seconds > 0
    await opened.pop().close()
    await until(lambda: entry.counts().sessions == 4)
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)


# --- information


async def test_anyone_may_ask_what_is_served(chain: Chain, stranger: Peer) -> None:
    for node in chain:
        stream = await say(stranger, node, INFO_STREAM)
        await stream.send(pb.DescribeRequest())
        said = await hear(stream)
        assert isinstance(said, pb.NodeDescription)
        assert said.artifact_id == node.manifest.artifact_id
        assert (said.span.first, said.span.last) == node.span
        assert said.state == pb.ONLINE
        assert [(slot.tokens, slot.total, slot.free) for slot in said.slots] == [(CONTEXT, 4, 4), (2 * CONTEXT, 1, 1)]
        assert said.chunk_tokens == CHUNK
        assert said.numerics_id == node.shared.host.info.numerics_id


async def piece(peer: Peer, node: SwarmNode, request: pb.ArtifactRequest) -> bytes:
    stream = await say(peer, node, INFO_STREAM)
    await stream.send(request)
    joiner, data = PartJoiner(64 << 20, request.offset), None
    while data is None:
        part = await hear(stream)
        assert isinstance(part, pb.ArtifactPart), part
        data = joiner.add(part)
    return data


async def test_manifest_and_header_are_served_as_the_artifact_id_says(chain: Chain, stranger: Peer) -> None:
    node = chain[0]
    artifact_id = node.manifest.artifact_id
    manifest = await piece(stranger, node, pb.ArtifactRequest(artifact_id=artifact_id, piece=pb.MANIFEST))
    assert hashlib.sha256(manifest).hexdigest() == artifact_id
    header = await piece(stranger, node, pb.ArtifactRequest(artifact_id=artifact_id, piece=pb.HEADER))
    assert hashlib.sha256(header).hexdigest() == node.manifest.header_sha256
    rest = await piece(stranger, node, pb.ArtifactRequest(artifact_id=artifact_id, piece=pb.HEADER, offset=100))
    assert rest == header[100:]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (pb.ArtifactRequest(artifact_id="0" * 64), pb.WRONG_ARTIFACT),
        (pb.ArtifactRequest(offset=1 << 27), pb.MALFORMED),
    ],
)
async def test_what_there_is_not_is_not_served(
    chain: Chain, stranger: Peer, changes: pb.ArtifactRequest, code: int
) -> None:
    request = pb.ArtifactRequest(artifact_id=chain[0].manifest.artifact_id, piece=pb.HEADER)
    request.MergeFrom(changes)
    stream = await say(stranger, chain[0], INFO_STREAM)
    await stream.send(request)
    assert (await refusal(stream)).code == code


# --- engines die


async def test_a_killed_engine_costs_its_sessions_and_nothing_else(chain: Chain, client: Peer) -> None:
    entry, last = chain
    pid, restarts = entry.shared.host.pid, entry.shared.host.restarts
    assert pid is not None
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)
        os.kill(pid, signal.SIGKILL)
        error = await refusal(mine.control[0])
        assert error.code == pb.ENGINE_LOST
        assert last.counts().sessions == 1, "the other hop is not touched"
        await until(lambda: entry.state == NodeState.ONLINE and entry.shared.host.ready)
        assert entry.shared.host.restarts == restarts + 1
        assert entry.counts() == Counts()
    async with session(client, *chain) as mine:
        await mine.compute(0, PROMPT)
    assert any(record.peer_id == entry.peer_id for record in await last.records())


async def test_a_session_that_costs_two_engines_is_refused(chain: Chain, client: Peer) -> None:
    entry = chain[0]
    culprit, idle = Session(client, chain), Session(client, chain)
    for epoch in (1, 2):
        assert entry.shared.host.pid is not None
        for one in (culprit, idle):
            one.epoch, one.number, one.control = epoch, 0, []
            await one.open()
        data = await culprit.attach()
        pid = entry.shared.host.pid
        os.kill(pid, signal.SIGSTOP)
        await data.send_step(culprit.step(0, PROMPT))
        await until(lambda: entry.shared.queue == 1)
        os.kill(pid, signal.SIGKILL)
        for one in (culprit, idle):
            error = await refusal(one.control[0])
            assert (error.code, error.blamed) == (pb.ENGINE_LOST, one is culprit)
            await one.close()
        await until(lambda: entry.state == NodeState.ONLINE and entry.shared.host.ready)
    culprit.epoch = idle.epoch = 3
    assert (await refused_open(client, entry, culprit.opening(0))).code == pb.SESSION_POISONED
    idle.control = []
    await idle.open()
    await idle.close()


# --- nodes of their own


async def test_silence_frees_a_session_and_pings_keep_it(llama_untied_path: Path, folder: Path) -> None:
    short = config(llama_untied_path, "0:6", folder, session_seconds=0.6)
    async with SwarmNode(short) as node, client_peer(node) as peer:
        async with session(peer, node) as mine, session(peer, node) as silent:
            alive = asyncio.create_task(keep_pinging(mine.control[0]))
            assert (await refusal(silent.control[0])).code == pb.UNKNOWN_SESSION
            await until(lambda: node.counts().sessions == 1)
            await mine.compute(0, PROMPT)
            alive.cancel()
        await until(lambda: node.counts() == Counts())


async def keep_pinging(control: FrameStream) -> None:
    while True:
        await control.send(pb.Ping(nonce=1))
        await asyncio.sleep(0.1)


async def test_one_peer_can_not_take_everything(llama_untied_path: Path, folder: Path) -> None:
    base = config(llama_untied_path, "0:6", folder)
    limits = Limits(sessions_per_peer=2, streams_per_peer=6)
    limited = type(base)(base.model, base.network, base.timeouts, limits, measure_speed=False)
    async with (
        SwarmNode(limited) as node,
        client_peer(node) as greedy,
        client_peer(node) as other,
        session(greedy, node) as a,
        session(greedy, node),
    ):
        error = await refused_open(greedy, node, Session(greedy, (node,)).opening(0))
        assert error.code == pb.LIMIT_REACHED
        for _ in range(2):
            await say(greedy, node, INFO_STREAM)
        await until(lambda: node.service.open_streams == 6)
        one_more = await say(greedy, node, INFO_STREAM)
        assert (await refusal(one_more)).code == pb.LIMIT_REACHED
        async with session(other, node) as theirs:
            await theirs.compute(0, PROMPT)
        await a.compute(0, PROMPT)


async def test_a_draining_node_finishes_what_runs(chain: Chain, llama_untied_path: Path, folder: Path) -> None:
    entry = chain[0]
    async with SwarmNode(config(llama_untied_path, "3:6", folder, entry.addresses)) as node, client_peer(entry) as peer:
        async with session(peer, entry, node) as mine:
            await mine.compute(0, PROMPT)
            draining = asyncio.create_task(node.drain())
            await until(lambda: node.state == NodeState.DRAINING)
            error = await refused_open(peer, node, Session(peer, (entry, node)).opening(1))
            assert error.code == pb.NODE_DRAINING
            await until(partial(is_announced, entry, node, NodeState.DRAINING))
            await mine.compute(len(PROMPT), [1])
            assert not draining.done()
        await asyncio.wait_for(draining, 20)
        peer_id = node.peer_id
    assert peer_id not in {record.peer_id for record in await entry.records()}, "the record was taken back"


async def is_announced(reader: SwarmNode, node: SwarmNode, state: NodeState) -> bool:
    return any(record.peer_id == node.peer_id and record.state == state for record in await reader.records())


async def test_leaving_ends_what_still_runs_and_every_child(llama_untied_path: Path, folder: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    async with SwarmNode(config(llama_untied_path, "0:6", folder)) as node, client_peer(node) as peer:
        mine = await Session(peer, (node,)).open()
        await mine.attach()
        await mine.compute(0, PROMPT)
        node._stop.set()
        assert (await refusal(mine.control[0])).code == pb.NODE_DRAINING
        await mine.close()
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left


async def test_a_clock_that_is_off_ends_the_start(
    chain: Chain, llama_untied_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peer, "start", partial(Peer.start, clock=lambda: time.time() - 10))
    node = SwarmNode(config(llama_untied_path, "0:6", folder, chain[0].addresses))
    with pytest.raises(
        ClockSkew, match=r"this clock is (9\.\d|10\.\d) s behind the swarm's .*: set it, for example"
    ) as skew:
        async with node:
            pass
    assert skew.value.exit_code == 6


async def test_slots_of_two_sizes_are_booked_by_need(llama_untied_path: Path, folder: Path) -> None:
    base = config(llama_untied_path, "0:6", folder)
    model = type(base.model)(llama_untied_path, "0:6", 4 << 30, contexts=(ContextSpec(1, 512), ContextSpec(1, 256)))
    given = type(base)(model, base.network, measure_speed=True, speed_folder=folder / "speed")
    async with SwarmNode(given) as node, client_peer(node) as peer:
        assert node.shared.speed.decode_tokens_per_second > 0
        assert node.shared.speed.prefill_tokens_per_second > 0
        assert await slots_empty(node)
        long = Session(peer, (node,))
        opening = long.opening(0)
        opening.context_tokens = 300
        control = await say(peer, node, CONTROL_STREAM)
        await control.send(opening)
        opened = await hear(control)
        assert isinstance(opened, pb.Opened) and opened.slot_tokens == 512
        async with session(peer, node) as short:
            await short.compute(0, PROMPT)
            one = node.shared.table.get(short.id)
            assert one is not None and one.slot_tokens == 256
            error = await refused_open(peer, node, Session(peer, (node,)).opening(0))
            assert error.code == pb.NODE_FULL

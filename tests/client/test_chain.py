"""A session against hops that refuse, fall silent, lie, or die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from swarm.client.chain import ChainSession, StepRequest, WantedRow
from swarm.client.config import Timeouts
from swarm.errors import ContextExceeded, IncompatiblePeer, NodeFull, PeerFailed, ProtocolError, SwarmError
from swarm.protocol import pb
from tests.client.scripted import N_VOCAB, TERMS, ScriptedHop, ScriptedNetwork, row_of, until

QUICK = Timeouts(
    connect_seconds=2, open_seconds=0.3, step_seconds=0.5, heartbeat_interval_seconds=0.05, heartbeat_seconds=0.3
)
ROW = WantedRow()
TOKENS = (5, 6, 7)


@asynccontextmanager
async def network(*hops: ScriptedHop) -> AsyncIterator[ScriptedNetwork]:
    made = ScriptedNetwork(hops)
    try:
        yield made
    finally:
        await made.close()


async def opened(net: ScriptedNetwork, timeouts: Timeouts = QUICK) -> ChainSession:
    return await ChainSession.open(net, net.places, TERMS, timeouts)


def tasks_of_sessions() -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "chain session"]


async def test_every_hop_is_told_its_layers_and_neighbours() -> None:
    async with network(ScriptedHop(), ScriptedHop(), ScriptedHop()) as net:
        async with await opened(net) as session:
            openings = [hop.opened[0] for hop in net.hops]
            assert [(o.run.first, o.run.last, o.hop_index) for o in openings] == [(0, 10, 0), (10, 20, 1), (20, 30, 2)]
            assert [o.predecessor.peer_id for o in openings] == ["client", "peer0", "peer1"]
            assert [o.successor.peer_id for o in openings] == ["peer1", "peer2", ""]
            assert not openings[2].HasField("successor")
            assert {(o.context_tokens, o.chunk_tokens, o.epoch) for o in openings} == {(1000, 8, 1)}
            assert {o.session_id for o in openings} == {session.session_id}
        await net.idle()
        assert [hop.said["Close"] for hop in net.hops] == [1, 1, 1]
        assert not tasks_of_sessions()


async def test_answers_carry_row_and_timings() -> None:
    async with network(ScriptedHop()) as net, await opened(net) as session:
        answer = await session.step(StepRequest(0, TOKENS, pb.PREFILL, WantedRow(temperature=0.5, ids=(1, 599))))
        row = row_of(7, 2)
        assert answer.row is not None
        assert answer.row.top_ids[0] == row.argmax()
        assert answer.row.asked.tolist() == row[[1, 599]].tolist()
        assert (answer.trace.start, answer.trace.n_tokens, len(answer.trace.hops)) == (0, 3, 1)
        assert answer.trace.hops[0].network_us + answer.trace.return_us <= answer.trace.total_us + 1000
        assert (await session.step(StepRequest(3, (1,), pb.DECODE))).row is None


async def test_the_whole_row_of_the_last_position_can_be_fetched() -> None:
    async with network(ScriptedHop()) as net, await opened(net) as session:
        await session.step(StepRequest(0, TOKENS, pb.PREFILL, ROW))
        assert np.array_equal(await session.fetch_row(2), row_of(7, 2))


async def test_an_exit_that_gives_no_more_rows_for_a_while_is_asked_again() -> None:
    async with network(ScriptedHop(rows_refused=2)) as net, await opened(net) as session:
        await session.step(StepRequest(0, TOKENS, pb.PREFILL, ROW))
        assert np.array_equal(await session.fetch_row(2), row_of(7, 2))
        assert net.hops[0].said["RowRequest"] == 3
        assert session.failure is None


@pytest.mark.parametrize("dies", [True, False])
async def test_nobody_waits_for_rows_longer_than_for_a_step(dies: bool) -> None:
    async with network(ScriptedHop(rows_refused=1, retry_after_seconds=1e9)) as net:
        session = await opened(net, replace(QUICK, step_seconds=30.0 if dies else 0.3))
        await session.step(StepRequest(0, TOKENS, pb.PREFILL, ROW))
        fetching = asyncio.create_task(session.fetch_row(2))
        await until(lambda: net.hops[0].said["RowRequest"])
        if dies:
            assert net.hops[0].control is not None
            await net.hops[0].control.close()
        with pytest.raises(PeerFailed, match="closed the connection" if dies else "did not send the logits row"):
            await fetching
        assert session.troubles[0].lost
        await session.close()


async def test_steps_may_be_in_flight_together() -> None:
    held: list[pb.Step] = []

    def keep(_hop: ScriptedHop, step: pb.Step) -> bool:
        held.append(step)
        return True

    async with network(ScriptedHop(on_step=keep)) as net, await opened(net) as session:
        numbers = [await session.send(StepRequest(at, (at,), pb.PREFILL)) for at in range(4)]
        await until(lambda: len(held) == 4)
        assert [step.step for step in held] == numbers == [1, 2, 3, 4]
        for step in held:
            await net.hops[0].answer(step)
        answers = [await session.answer(number) for number in numbers]
        assert [answer.trace.start for answer in answers] == [0, 1, 2, 3]


REFUSALS = [
    (pb.Error(code=pb.NODE_FULL, message="no slot", retry_after_seconds=3), NodeFull, "no free slot"),
    (pb.Error(code=pb.WRONG_ARTIFACT, theirs="a", ours="b"), IncompatiblePeer, "serves another artifact"),
    (pb.Error(code=pb.NODE_DRAINING), PeerFailed, "leaving the swarm"),
    (pb.Error(code=pb.CONTEXT_FULL, message="4096 at most"), ContextExceeded, "4096 at most"),
]


@pytest.mark.parametrize(("error", "kind", "text"), REFUSALS)
async def test_a_refusal_frees_the_other_hops(error: pb.Error, kind: type[SwarmError], text: str) -> None:
    async with network(ScriptedHop(), ScriptedHop(refuse=error), ScriptedHop()) as net:
        with pytest.raises(kind, match=rf"peer1 \(layers 10:20\).*{text}"):
            await opened(net)
        await net.idle()
        assert [hop.sessions for hop in net.hops] == [0, 0, 0]


async def test_a_full_node_says_when_to_come_back() -> None:
    full = pb.Error(code=pb.NODE_FULL, retry_after_seconds=3)
    async with network(ScriptedHop(refuse=full)) as net:
        with pytest.raises(NodeFull) as caught:
            await opened(net)
        assert (caught.value.retry_after_seconds, caught.value.peer) == (3, "peer0")


async def test_an_unreachable_hop_is_named() -> None:
    async with network(ScriptedHop(), ScriptedHop()) as net:
        net.unreachable.add("peer1")
        with pytest.raises(PeerFailed, match=r"peer1 \(layers 10:20\) can't be reached \(connection refused\); try"):
            await opened(net)
        await net.idle()


async def test_a_hop_that_never_opens_is_named() -> None:
    async with network(ScriptedHop(), ScriptedHop(answers_open=False)) as net:
        with pytest.raises(PeerFailed, match=r"peer1 \(layers 10:20\) did not open the session within 0.3 s"):
            await opened(net)


async def test_cancelling_while_opening_leaves_nothing() -> None:
    async with network(ScriptedHop(), ScriptedHop(answers_open=False)) as net:
        opening = asyncio.create_task(opened(net, replace(QUICK, open_seconds=60)))
        await until(lambda: all(hop.opened for hop in net.hops))
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await net.idle()


Trouble = Callable[[ScriptedNetwork, ChainSession], Coroutine[None, None, None]]


async def _close(net: ScriptedNetwork, _session: ChainSession) -> None:
    assert net.hops[1].control is not None
    await net.hops[1].control.close()


async def _error(net: ScriptedNetwork, session: ChainSession) -> None:
    await net.hops[1].say(pb.Error(code=pb.ENGINE_LOST, message="signal 9", session_id=session.session_id, step=1))


async def _link(net: ScriptedNetwork, session: ChainSession) -> None:
    await net.hops[0].say(pb.LinkFailed(session_id=session.session_id, epoch=1, successor="peer1", cause="reset"))


async def _nonsense(net: ScriptedNetwork, _session: ChainSession) -> None:
    await net.hops[1].say(pb.Attached(epoch=1))


async def _silence(net: ScriptedNetwork, _session: ChainSession) -> None:
    net.hops[1].answers_pings = False


async def _bad_answer(net: ScriptedNetwork, session: ChainSession) -> None:
    await net.hops[1].say(pb.Answer(session_id=session.session_id, epoch=1, step=1))


async def _bad_ids(net: ScriptedNetwork, session: ChainSession) -> None:
    row = pb.RowSummary(top_ids=[N_VOCAB], top_logits=[1.0])
    await net.hops[1].say(pb.Answer(session_id=session.session_id, epoch=1, step=1, rows=[row]))


TROUBLES: list[tuple[Trouble, type[PeerFailed], str]] = [
    (_close, PeerFailed, "closed the connection"),
    (_error, PeerFailed, "lost its engine .*signal 9"),
    (_link, PeerFailed, "can't be reached from peer peer0"),
    (_nonsense, ProtocolError, "Attached is out of order"),
    (_silence, PeerFailed, "has been silent for 0.3"),
    (_bad_answer, ProtocolError, "0 rows instead of one"),
    (_bad_ids, ProtocolError, "outside the vocabulary"),
]


@pytest.mark.parametrize(("trouble", "kind", "text"), TROUBLES, ids=[trouble[0].__name__ for trouble in TROUBLES])
async def test_a_failure_during_a_step_names_peer_and_layers(
    trouble: Trouble, kind: type[PeerFailed], text: str
) -> None:
    async with network(ScriptedHop(answers_steps=False), ScriptedHop()) as net:
        async with await opened(net, replace(QUICK, step_seconds=30)) as session:
            number = await session.send(StepRequest(0, TOKENS, pb.PREFILL, ROW))
            await trouble(net, session)
            with pytest.raises(kind, match=rf"peer1 \(layers 10:20\).*{text}.*try again") as caught:
                await session.answer(number)
            assert (caught.value.peer, caught.value.layers) == ("peer1", (10, 20))
            with pytest.raises(kind):
                await session.send(StepRequest(3, (1,), pb.DECODE, ROW))
        await net.idle()
        assert not tasks_of_sessions()


async def test_a_living_chain_without_progress_names_the_hop_that_holds_it_up() -> None:
    async with network(ScriptedHop(), ScriptedHop(answers_steps=False)) as net:
        net.hops[0].answers_steps = False
        async with await opened(net) as session:
            number = await session.send(StepRequest(0, TOKENS, pb.PREFILL, ROW))
            net.hops[1].steps.clear()
            with pytest.raises(PeerFailed, match=r"peer1 \(layers 10:20\) did not finish a step within 0.5 s"):
                await session.answer(number)


async def test_late_and_foreign_answers_change_nothing() -> None:
    async with (
        network(ScriptedHop(answers_steps=False)) as net,
        await opened(net, replace(QUICK, step_seconds=30)) as s,
    ):
        number = await s.send(StepRequest(0, TOKENS, pb.PREFILL))
        await until(lambda: net.hops[0].steps)
        for wrong in ({"epoch": 9}, {"step": 77}, {"session_id": b"x" * 16}):
            right = {"session_id": s.session_id, "epoch": 1, "step": number}
            await net.hops[0].say(pb.Answer(**{**right, **wrong}, numerics_id="wrong"))  # type: ignore[arg-type]
        await net.hops[0].answer(net.hops[0].steps[0])
        assert (await s.answer(number)).numerics_id == ""


async def test_cancelling_a_step_frees_every_hop() -> None:
    async with network(ScriptedHop(answers_steps=False), ScriptedHop()) as net:

        async def use() -> None:
            async with await opened(net, Timeouts()) as session:
                await session.step(StepRequest(0, TOKENS, pb.PREFILL, ROW))

        using = asyncio.create_task(use())
        await until(lambda: net.hops[0].steps)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        await net.idle()
        assert [hop.sessions for hop in net.hops] == [0, 0]
        assert not tasks_of_sessions()

"""Sessions that outlive hops which do as they are told: what each is told then, and how it ends when nobody comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from dht.record import NodeState, SlotClass, SpanRecord
from swarm.client.blame import Avoided
from swarm.client.chain import ChainSession, StepAnswer, StepRequest, WantedRow
from swarm.client.config import ClientConfig, Timeouts
from swarm.client.hop import HopPlace
from swarm.client.keeper import Keeper
from swarm.client.lasting import LastingSession
from swarm.client.recovery import Recovery, Swarm
from swarm.errors import ContextExceeded, SessionLost, SessionPoisoned, SwarmError, UsageError
from swarm.ids import PeerId
from swarm.protocol import pb
from swarm.routing import RouteRequest
from tests.client.scripted import TERMS, ScriptedHop, ScriptedNetwork, row_of, until

QUICK = Timeouts(
    connect_seconds=2,
    open_seconds=2,
    heartbeat_interval_seconds=0.2,
    heartbeat_seconds=5,
    recover_seconds=30,
)
ROW = WantedRow()
TOKENS = (5, 6, 7)
CHAIN = 3  # hops; those after them are spare


def record(peer: str, first: int, last: int) -> SpanRecord:
    return SpanRecord(
        peer_id=peer,
        artifact_id=TERMS.artifact_id,
        n_layers=30,
        first=first,
        last=last,
        state=NodeState.ONLINE,
        protocol_version=1,
        numerics_id="n",
        slots=(SlotClass(tokens=4096, total=4, free=4),),
        chunk_tokens=64,
    )


@dataclass
class Scene:
    """Three hops of ten layers; ``spare`` names who else serves which layers."""

    network: ScriptedNetwork
    session: LastingSession
    avoided: Avoided
    records: list[SpanRecord]
    said: list[str] = field(default_factory=list)

    @property
    def hops(self) -> list[ScriptedHop]:
        return self.network.hops

    async def prefilled(self) -> None:
        await self.session.step(StepRequest(0, TOKENS, pb.PREFILL, ROW))
        await self.session.step(StepRequest(3, (8,), pb.DECODE, ROW))

    async def lose(self, hop: int, error: pb.Error | None = None) -> None:
        control = self.hops[hop].control
        assert control is not None
        if error is not None:
            await control.send(error)
        await control.close()

    def peers(self) -> list[str]:
        return [place.peer_id for place in self.session.places]


@asynccontextmanager
async def scene(
    *spare: tuple[int, int],
    timeouts: Timeouts = QUICK,
    standby: bool = False,
    cuts: tuple[int, ...] = (0, 10, 20, 30),
) -> AsyncIterator[Scene]:
    network = ScriptedNetwork([ScriptedHop() for _ in range(CHAIN + len(spare))])
    for index, layers in enumerate(spare, CHAIN):
        network.places[index] = HopPlace(index, PeerId(f"peer{index}"), layers)
    records = [record(place.peer_id, *place.layers) for place in network.places]
    said: list[str] = []

    async def look() -> Sequence[SpanRecord]:
        return records

    request = RouteRequest(legal_cuts=cuts, artifact_id=TERMS.artifact_id, context_tokens=1)
    avoided = Avoided()
    swarm = Swarm(network, lambda: records, look, request)
    recovery = Recovery(swarm, ClientConfig(timeouts=timeouts), avoided, said.append)
    try:
        chain = await ChainSession.open(network, network.places[:CHAIN], TERMS, timeouts)
        keeper = Keeper(swarm, avoided, recovery.understudies, standby=standby)
        async with LastingSession(chain, recovery, avoided, keeper=keeper) as session:
            yield Scene(network, session, avoided, records, said)
        await network.idle()
        assert [hop.sessions for hop in network.hops] == [0] * len(network.hops)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "chain session"]
    finally:
        await network.close()


async def test_hops_are_told_the_exit_first_what_to_feed() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        await at.lose(1)
        answer = await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        assert answer.row is not None and answer.row.top_ids[0] == row_of(9, 4).argmax()
        assert at.peers() == ["peer0", "peer3", "peer2"]
        (exit_route,), (entry_route,), (opening,) = at.hops[2].rerouted, at.hops[0].rerouted, at.hops[3].opened
        assert (exit_route.predecessor.peer_id, exit_route.keep_tokens, exit_route.push_journal) == ("peer3", 4, False)
        assert (opening.epoch, opening.successor_position, opening.hop_index) == (2, 4, 1)
        assert (entry_route.successor.peer_id, entry_route.successor_position) == ("peer3", 0)
        assert entry_route.push_journal and entry_route.epoch == 2
        assert not any(step.replay for step in at.hops[0].steps), "the entry has it all"
        (recovery,) = at.session.recoveries
        assert recovery.position == 4 and recovery.lost == (("peer1", (10, 20)),)
        assert recovery.came == (("peer3", (10, 20)),)


async def test_a_new_entry_gets_the_tokens_in_the_shapes_of_before() -> None:
    async with scene((0, 10)) as at:
        await at.prefilled()
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        await at.lose(0)
        await at.session.step(StepRequest(5, (10,), pb.DECODE, ROW))
        steps = [step for step in at.hops[3].steps if step.epoch == 2]
        assert [(step.start, list(step.tokens), step.kind, step.replay) for step in steps] == [
            (0, [5, 6, 7], pb.PREFILL, True),
            (3, [8, 9], pb.DECODE, True),
            (5, [10], pb.DECODE, False),
        ]
        assert steps[0].step > 1 << 40, "a journal's pushes come before"


async def test_what_was_sent_and_not_answered_is_sent_again() -> None:
    async with scene((20, 30)) as at:
        await at.prefilled()
        at.hops[0].answers_steps = False
        number = await at.session.send(StepRequest(4, (9,), pb.DECODE, ROW))
        await until(lambda: len(at.hops[0].steps) == 3)
        at.hops[0].answers_steps = True
        await at.lose(2)
        answer = await at.session.answer(number)
        assert answer.row is not None and answer.row.top_ids[0] == row_of(9, 4).argmax()


async def test_a_row_that_its_exit_took_along_is_computed_again() -> None:
    async with scene((20, 30)) as at:
        await at.prefilled()
        await at.lose(2)
        assert np.array_equal(await at.session.fetch_row(3), row_of(8, 3))
        assert at.peers()[2] == "peer3"
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))


async def test_several_take_the_place_of_one() -> None:
    async with scene((0, 20), (10, 30)) as at:
        at.records[:] = [one for one in at.records if one.peer_id not in ("peer0", "peer1", "peer2")]
        await at.prefilled()
        await at.lose(1)
        await at.lose(2)
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        layers = [place.layers for place in at.session.places]
        assert layers[0][0] == 0 and layers[-1][1] == 30
        assert set(at.peers()) <= {"peer0", "peer3", "peer4"}


async def test_a_link_that_fails_twice_is_left_out_and_its_peers_are_not_blamed() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        at.hops[0].answers_steps = False
        stepping = asyncio.create_task(at.session.step(StepRequest(4, (9,), pb.DECODE, ROW)))
        await until(lambda: len(at.hops[0].steps) == 3)
        failed = pb.LinkFailed(session_id=at.session.session_id, epoch=1, successor="peer1", cause="reset")
        await at.hops[0].say(failed)
        await until(lambda: len(at.hops[0].steps) == 4)
        assert at.peers() == ["peer0", "peer1", "peer2"], "the first time it is tried again"
        at.hops[0].answers_steps = True
        failed.epoch = 2
        await at.hops[0].say(failed)
        await stepping
        assert at.peers() == ["peer0", "peer3", "peer2"]
        assert not at.avoided.now()


async def test_it_says_what_it_waits_for_and_goes_on_when_somebody_comes() -> None:
    async with scene((10, 20)) as at:
        spare = at.records.pop()
        at.network.unreachable.add("peer1")
        await at.prefilled()
        await at.lose(1)
        stepping = asyncio.create_task(at.session.step(StepRequest(4, (9,), pb.DECODE, ROW)))
        await until(lambda: at.said)
        assert "waiting up to 30 s more to go on" in at.said[0] and "layers 10:20" in at.said[0]
        at.records.append(spare)
        await stepping
        assert at.peers()[1] == "peer3"


async def test_what_it_waits_for_is_not_said_at_every_look() -> None:
    async with scene(timeouts=Timeouts(recover_seconds=1.5)) as at:
        await at.prefilled()
        at.network.unreachable.add("peer1")
        await at.lose(1)
        with pytest.raises(SessionLost):
            await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        reasons = [line.partition("to go on: ")[2] for line in at.said]
        assert reasons and len(reasons) == len(set(reasons)), at.said


async def test_when_nobody_comes_the_error_tells_the_whole_story() -> None:
    async with scene(timeouts=Timeouts(recover_seconds=0.5)) as at:
        at.network.unreachable.add("peer1")
        await at.prefilled()
        await at.lose(1)
        with pytest.raises(SessionLost) as lost:
            await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        text = str(lost.value)
        assert "lost at position 4" in text and "peer1 (layers 10:20) closed the connection" in text
        assert "can't be reached (connection refused)" in text and text.endswith("--initial-peers ADDRESS")
        with pytest.raises(SessionLost):
            await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))


DIED = pb.Error(code=pb.ENGINE_LOST, message="signal 9")
DIED_OF_IT = pb.Error(code=pb.ENGINE_LOST, message="signal 9", blamed=True)


@asynccontextmanager
async def hanging_step(at: Scene) -> AsyncIterator[asyncio.Task[StepAnswer]]:
    """A step that no hop answers."""
    await at.prefilled()
    at.hops[0].answers_steps = False
    stepping = asyncio.create_task(at.session.step(StepRequest(4, (9,), pb.DECODE, ROW)))
    await until(lambda: len(at.hops[0].steps) == 3)
    yield stepping


async def test_a_step_that_two_engines_died_of_is_enough() -> None:
    async with scene((10, 20)) as at, hanging_step(at) as stepping:
        await at.lose(1, DIED_OF_IT)
        await until(lambda: at.hops[3].sessions and at.session.places[1].peer_id == "peer3")
        assert at.hops[3].opened[0].suspect and not at.hops[1].opened[0].suspect
        await at.lose(3, DIED_OF_IT)
        with pytest.raises(SessionPoisoned, match=r"from position 4 on ended 2 engines .*; start a new session"):
            await stepping


@pytest.mark.parametrize("first", [DIED, DIED_OF_IT])
async def test_engines_that_died_of_others_are_not_counted(first: pb.Error) -> None:
    async with scene((10, 20), (10, 20)) as at, hanging_step(at) as stepping:
        await at.lose(1, first)
        await until(lambda: at.peers()[1] in ("peer3", "peer4"))
        heir = int(at.peers()[1][-1])
        assert at.hops[heir].opened[0].suspect == first.blamed
        await at.lose(heir, DIED)
        await until(lambda: at.peers()[1] not in ("peer1", f"peer{heir}"))
        at.hops[0].answers_steps = True
        await at.lose(2)  # so that the step is sent once more
        await stepping


async def test_hops_that_stay_are_told_of_the_suspicion_too() -> None:
    async with scene((10, 20), (20, 30)) as at, hanging_step(at) as stepping:
        await at.lose(1, DIED_OF_IT)
        await until(lambda: at.peers()[1] == "peer3")
        assert [hop.rerouted[-1].suspect for hop in (at.hops[0], at.hops[2])] == [True, True]
        await at.lose(2, DIED_OF_IT)
        with pytest.raises(SessionPoisoned):
            await stepping


async def test_two_engines_that_died_at_once_prove_nothing() -> None:
    """Before the hops knew of any suspicion."""
    async with scene((10, 20), (20, 30)) as at, hanging_step(at) as stepping:
        at.hops[0].answers_steps = True
        await asyncio.gather(at.lose(1, DIED_OF_IT), at.lose(2, DIED_OF_IT))
        await stepping
        assert [hop.opened[0].suspect for hop in (at.hops[3], at.hops[4])] == [True, True]


async def test_what_has_passed_is_no_longer_suspected() -> None:
    async with scene((10, 20), (10, 20)) as at:
        await at.prefilled()
        for position in (4, 5):
            await at.lose(int(at.peers()[1][-1]), DIED_OF_IT)
            await at.session.step(StepRequest(position, (9,), pb.DECODE, ROW))
        await at.lose(0)
        at.records.append(record("peer5", 0, 10))
        at.network.hops.append(ScriptedHop())
        at.network.places.append(HopPlace(5, PeerId("peer5"), (0, 10)))
        await at.session.step(StepRequest(6, (9,), pb.DECODE, ROW))
        opened = [opening.suspect for hop in at.hops[3:] for opening in hop.opened]
        assert sorted(opened) == [False, True, True]


async def test_an_engine_is_not_risked_again_where_one_was_lost() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        await at.lose(1, pb.Error(code=pb.ENGINE_LOST, message="signal 9"))
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        assert at.peers()[1] == "peer3"


async def test_who_was_lost_last_is_asked_last() -> None:
    """Of two that failed a moment ago the one lost before may be well again."""
    async with scene((10, 20)) as at:
        await at.prefilled()
        for position, (lost, comes) in enumerate([(1, 3), (3, 1), (1, 3)], 4):
            await at.lose(lost)
            await at.session.step(StepRequest(position, (9,), pb.DECODE, ROW))
            assert at.peers()[1] == f"peer{comes}"


FULL = pb.Error(code=pb.CONTEXT_FULL, message="no more", step=3)
POISONED = pb.Error(code=pb.SESSION_POISONED, message="it ends engines")


@pytest.mark.parametrize(("said", "kind"), [(FULL, ContextExceeded), (POISONED, SessionPoisoned)])
async def test_what_one_hop_says_of_the_session_costs_its_seat_and_two_are_believed(
    said: pb.Error, kind: type[SwarmError]
) -> None:
    async with scene((10, 20), (10, 20)) as at:
        await at.prefilled()
        at.hops[0].answers_steps = False
        stepping = asyncio.create_task(at.session.step(StepRequest(4, (9,), pb.DECODE, ROW)))
        await until(lambda: len(at.hops[0].steps) == 3)
        await at.hops[1].say(said)
        await until(lambda: at.peers()[1] != "peer1")
        assert not stepping.done()
        await at.hops[int(at.peers()[1][-1])].say(said)
        with pytest.raises(kind):
            await stepping


async def test_a_hop_that_is_well_can_be_replaced_while_answers_are_awaited() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        at.hops[0].answers_steps = False
        stepping = asyncio.create_task(at.session.step(StepRequest(4, (9,), pb.DECODE, ROW)))
        await until(lambda: len(at.hops[0].steps) == 3)
        at.hops[0].answers_steps = True
        assert await at.session.replace(1, "it is slow")
        answer = await stepping
        assert answer.row is not None and answer.row.top_ids[0] == row_of(9, 4).argmax()
        assert at.peers() == ["peer0", "peer3", "peer2"]
        await until(lambda: at.hops[1].said["Close"] == 1)
        assert not at.avoided.now()
        (handed,) = at.session.recoveries
        assert handed.voluntary and handed.position == 4
        assert "handed over at position 4" in str(handed)
        assert "peer1 (layers 10:20) is replaced (it is slow)" in str(handed)


async def test_who_shall_replace_a_hop_can_be_said_and_is_asked_first() -> None:
    async with scene((10, 20), (10, 20)) as at:
        await at.prefilled()
        for by in (4, 3):
            assert await at.session.replace(1, "it is slow", PeerId(f"peer{by}"))
            assert at.peers()[1] == f"peer{by}"
            await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        at.hops[4].refuse = pb.Error(code=pb.NODE_FULL, message="no slot")
        assert await at.session.replace(1, "it is slow", PeerId("peer4"))
        assert at.peers()[1] == "peer1", "another that is well comes before the one that was left"
        assert not await at.session.replace(1, "it is slow", PeerId("peer9"))
        await at.session.step(StepRequest(5, (9,), pb.DECODE, ROW))


async def test_without_anybody_to_take_over_a_hop_stays() -> None:
    async with scene((0, 30)) as at:
        at.records.pop()
        await at.prefilled()
        assert not await at.session.replace(1, "it is slow")
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        assert at.peers() == ["peer0", "peer1", "peer2"] and not at.session.recoveries


async def test_when_a_stand_in_does_not_come_the_hop_stays() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        at.hops[3].refuse = pb.Error(code=pb.NODE_FULL, message="no slot")
        assert not await at.session.replace(1, "it is slow")
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        assert at.peers() == ["peer0", "peer1", "peer2"] and len(at.hops[1].opened) == 1
        assert at.session.recoveries[0].replayed_tokens == 0


async def test_a_row_of_a_replaced_exit_is_computed_again() -> None:
    async with scene((20, 30)) as at:
        await at.prefilled()
        assert await at.session.replace(2, "it is slow")
        assert np.array_equal(await at.session.fetch_row(3), row_of(8, 3))
        assert len(at.session.recoveries) == 1


def _twice(route: pb.Reroute) -> list[pb.Rerouted | pb.Error]:
    return [pb.Rerouted(epoch=route.epoch, position=route.keep_tokens)] * 2


def _of_another_epoch(route: pb.Reroute) -> list[pb.Rerouted | pb.Error]:
    return [pb.Rerouted(epoch=route.epoch + 1, position=route.keep_tokens)]


def _too_much(route: pb.Reroute) -> list[pb.Rerouted | pb.Error]:
    return [pb.Rerouted(epoch=route.epoch, position=route.keep_tokens + 1)]


def _too_much_without_a_journal(route: pb.Reroute) -> list[pb.Rerouted | pb.Error]:
    return [pb.Error(code=pb.JOURNAL_MISSING, message="none", position=route.keep_tokens + 1)]


@pytest.mark.parametrize("answers", [_twice, _of_another_epoch, _too_much, _too_much_without_a_journal])
async def test_a_hop_that_answers_a_route_with_nonsense_is_replaced(
    answers: Callable[[pb.Reroute], list[pb.Rerouted | pb.Error]],
) -> None:
    async with scene((10, 20), (20, 30)) as at:
        await at.prefilled()
        at.hops[2].on_reroute = answers
        await at.lose(1)
        answer = await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        assert answer.row is not None and answer.row.top_ids[0] == row_of(9, 4).argmax()
        assert at.peers() == ["peer0", "peer3", "peer4"]
        assert "peer2" in at.avoided.now()


async def test_a_journal_s_read_error_that_crosses_a_new_route_is_no_nonsense() -> None:
    """It comes before the route's own answer, which may even come after the next one was asked for."""
    async with scene((10, 20), (10, 20)) as at:
        await at.prefilled()
        crossing = pb.Error(code=pb.JOURNAL_MISSING, message="the journal can't be read")
        at.hops[0].on_reroute = lambda route: [crossing, pb.Rerouted(epoch=route.epoch, position=route.keep_tokens)]
        await at.lose(1)
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        assert at.peers()[0] == "peer0"
        assert [step.start for step in at.hops[0].steps if step.replay] == [0, 3], "all is fed anew"


async def test_one_hop_cannot_refuse_the_session_for_all() -> None:
    async with scene((10, 20), (10, 20), (20, 30)) as at:
        await at.prefilled()
        at.hops[2].on_reroute = lambda _route: [POISONED]
        await at.lose(1)
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        assert at.peers()[2] == "peer5"
        await at.session.step(StepRequest(5, (9,), pb.DECODE, ROW))
        spare = 7 - int(at.peers()[1][-1])  # of 3 and 4
        at.hops[spare].refuse = POISONED
        await at.lose(7 - spare)
        await at.session.step(StepRequest(6, (9,), pb.DECODE, ROW))
        assert at.hops[spare].opened and at.peers()[1] != f"peer{spare}"


async def test_two_that_won_t_have_the_session_are_believed() -> None:
    async with scene((10, 20), (10, 20)) as at:
        await at.prefilled()
        at.hops[3].refuse = at.hops[4].refuse = POISONED
        at.network.unreachable.add("peer1")
        await at.lose(1)
        with pytest.raises(SessionPoisoned, match="it ends engines"):
            await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))


async def test_beyond_the_context_is_said_before_any_hop_is_asked() -> None:
    async with scene() as at:
        await at.prefilled()
        with pytest.raises(ContextExceeded, match="opened for 1000 tokens"):
            await at.session.send(StepRequest(4, tuple(range(997)), pb.PREFILL, ROW))
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))


async def test_closing_ends_a_recovery_that_waits() -> None:
    async with scene() as at:
        at.network.unreachable.add("peer1")
        await at.prefilled()
        await at.lose(1)
        stepping = asyncio.create_task(at.session.step(StepRequest(4, (9,), pb.DECODE, ROW)))
        await until(lambda: at.said)
        await at.session.close()
        with pytest.raises(SwarmError, match="session is closed"):
            await stepping


async def test_cancelling_ends_a_recovery_that_waits() -> None:
    async with scene() as at:
        at.network.unreachable.add("peer1")
        await at.prefilled()
        await at.lose(1)
        stepping = asyncio.create_task(at.session.step(StepRequest(4, (9,), pb.DECODE, ROW)))
        await until(lambda: at.said)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping


async def test_a_gap_is_the_callers_mistake() -> None:
    async with scene() as at:
        await at.prefilled()
        with pytest.raises(UsageError, match="starts at 5, after 4 tokens"):
            await at.session.send(StepRequest(5, (9,), pb.DECODE, ROW))
        await at.session.step(StepRequest(2, (9,), pb.DECODE, ROW))


async def test_a_session_that_lost_a_hop_while_it_waited_can_be_forked() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        await at.lose(1)
        await until(lambda: at.session.chain.failure is not None)
        fork, track = await at.session.forked(at.network)
        assert [place.peer_id for place in fork.places] == at.peers() == ["peer0", "peer3", "peer2"]
        assert track.end == 4 and at.session.tokens == (*TOKENS, 8)
        await fork.close()


async def test_a_pause_is_not_told_longer_than_somebody_waited() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        assert await at.session.replace(1, "was slow")
        await asyncio.sleep(0.5)
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        (recovery,) = at.session.recoveries
        assert recovery.planning_seconds + recovery.replay_seconds < 0.5


@pytest.mark.parametrize("passes", [1, 2, 3, 5, 8])
async def test_closing_goes_on_when_its_caller_is_cancelled(passes: int) -> None:
    async with scene() as at:
        await at.prefilled()
        closing = asyncio.create_task(at.session.close())
        for _ in range(passes):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        async with asyncio.timeout(10):
            await at.network.idle()


async def test_a_session_that_rested_goes_on_with_others_or_is_closed_soon() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        await at.lose(1)
        await until(lambda: at.session.chain.failure)
        assert await at.session.resume(5)
        assert at.peers() == ["peer0", "peer3", "peer2"]
        await at.session.step(StepRequest(4, (9,), pb.DECODE, ROW))
        for hop in (1, 3):
            at.hops[hop].refuse = pb.Error(code=pb.NODE_FULL, message="no slot is free", retry_after_seconds=0.1)
        await at.lose(3)
        await until(lambda: at.session.chain.failure)
        async with asyncio.timeout(10):
            assert not await at.session.resume(0.2)
            await at.network.idle()
        with pytest.raises(SessionLost, match="no slot is free"):
            await at.session.step(StepRequest(5, (9,), pb.DECODE, ROW))

"""Understudies of scripted hops: who is asked to wait, what is copied, and what becomes of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dht.record import SlotClass
from swarm.client import keeper
from swarm.client.chain import StepRequest
from swarm.client.understudy import Understudy
from swarm.errors import SwarmError
from swarm.ids import PeerId
from swarm.protocol import pb
from tests.client.scripted import ScriptedHop, row_of, until
from tests.client.test_lasting import QUICK, ROW, TOKENS, Scene, scene

DRAIN_SECONDS = 30.0


async def drains(at: Scene, hop: int, seconds: float = DRAIN_SECONDS) -> None:
    await at.hops[hop].say(pb.Draining(session_id=at.session.session_id, seconds=seconds))


async def copied(at: Scene, primary: int, understudy: int, position: int, failure: str = "") -> None:
    """Said without being asked again, as of a finished block."""
    peer = f"peer{understudy}"
    order = max((copy.order for copy in at.hops[primary].copies if copy.understudy.peer_id == peer), default=0)
    said = pb.Copied(session_id=at.session.session_id, understudy=peer, position=position, failure=failure)
    said.order = order
    await at.hops[primary].say(said)


def holds(hop: ScriptedHop, position: int) -> None:
    hop.on_reroute = lambda route: [pb.Rerouted(epoch=route.epoch, position=min(position, route.keep_tokens))]


async def decoded(at: Scene, position: int) -> None:
    answer = await at.session.step(StepRequest(position, (9,), pb.DECODE, ROW))
    assert answer.row is not None and answer.row.top_ids[0] == row_of(9, position).argmax()


async def test_each_hop_gets_an_understudy_once_there_is_something_to_copy() -> None:
    async with scene((0, 20), (10, 20), (10, 30), standby=True) as at:
        assert not any(hop.opened for hop in at.hops[3:])
        await at.prefilled()
        await until(lambda: all(len(hop.copies) == 1 for hop in at.hops[:3]))
        orders = [hop.copies[0] for hop in at.hops[:3]]
        assert [order.upto_tokens for order in orders] == [0, 0, 0]
        assert len({order.understudy.peer_id for order in orders}) == 3
        for index, order in enumerate(orders):
            opening = at.hops[int(order.understudy.peer_id[-1])].opened[0]
            assert opening.understudy_of.peer_id == f"peer{index}" and opening.epoch == 1
            assert (opening.run.first, opening.run.last) == (10 * index, 10 * index + 10)
            assert opening.hop_index == index and opening.numerics_id == "n"
            assert opening.HasField("successor") == (index < 2)


async def test_nobody_waits_with_other_numerics_or_for_a_part_or_in_a_last_slot() -> None:
    async with scene((10, 20), (10, 20), (0, 20), standby=True) as at:
        at.records[3] = at.records[3].model_copy(update={"numerics_id": "other"})
        at.records[4] = at.records[4].model_copy(update={"slots": (SlotClass(tokens=4096, total=4, free=1),)})
        await at.prefilled()
        await until(lambda: at.hops[5].waits)
        await decoded(at, 4)
        assert not at.hops[3].opened and not at.hops[4].opened
        assert len(at.hops[5].opened) == 1, "it can wait for one of them only"


async def test_when_its_primary_dies_an_understudy_goes_on_from_what_it_holds() -> None:
    async with scene((10, 20), (10, 20), standby=True) as at:
        await at.prefilled()
        await until(lambda: at.hops[1].copies)
        waiting = int(at.hops[1].copies[0].understudy.peer_id[-1])
        holds(at.hops[waiting], 2)
        await at.lose(1)
        await decoded(at, 4)
        assert at.peers() == ["peer0", f"peer{waiting}", "peer2"]
        (route,), (before,) = at.hops[waiting].rerouted, at.hops[0].rerouted
        assert (route.epoch, route.keep_tokens, route.successor_position) == (2, 4, 4)
        assert before.successor_position == 2
        (recovery,) = at.session.recoveries
        assert (recovery.copied_tokens, recovery.replayed_tokens) == (2, 2)
        await until(lambda: at.hops[waiting].copies)
        assert at.hops[waiting].copies[0].understudy.peer_id == f"peer{7 - waiting}", "and has one of its own"


async def test_all_may_go_at_once() -> None:
    async with scene((0, 10), (10, 20), (20, 30), standby=True) as at:
        await at.prefilled()
        await until(lambda: all(hop.copies for hop in at.hops[:3]))
        for hop in at.hops[3:]:
            holds(hop, 3)
        for lost in range(3):
            await at.lose(lost)
        await decoded(at, 4)
        assert at.peers() == ["peer3", "peer4", "peer5"]
        replayed = [(step.start, list(step.tokens)) for step in at.hops[3].steps if step.replay]
        assert replayed == [(3, [8])]


async def test_an_understudy_that_dies_is_dropped_and_another_is_found() -> None:
    async with scene((10, 20), (10, 20), standby=True) as at:
        await at.prefilled()
        await until(lambda: at.hops[1].copies)
        waiting = int(at.hops[1].copies[0].understudy.peer_id[-1])
        at.network.unreachable.add(f"peer{waiting}")
        await at.lose(waiting)
        await until(lambda: at.hops[7 - waiting].waits)
        await decoded(at, 4)
        assert not at.session.recoveries


async def test_one_that_dies_with_its_primary_costs_the_replay() -> None:
    async with scene((10, 20), (10, 20), standby=True) as at:
        await at.prefilled()
        await until(lambda: at.hops[1].copies)
        waiting = int(at.hops[1].copies[0].understudy.peer_id[-1])
        at.network.unreachable.add(f"peer{waiting}")
        at.hops[waiting].on_reroute = lambda _route: [pb.Error(code=pb.ENGINE_LOST, message="signal 9")]
        await at.lose(1)
        await decoded(at, 4)
        assert at.peers() == ["peer0", f"peer{7 - waiting}", "peer2"]
        assert at.hops[7 - waiting].opened[-1].epoch > 2
        assert not at.hops[7 - waiting].opened[-1].HasField("understudy_of")


async def test_what_was_rolled_back_is_not_kept() -> None:
    async with scene((10, 20), standby=True) as at:
        await at.prefilled()
        await until(lambda: at.hops[1].copies)
        await copied(at, 1, 3, 4)
        await at.session.step(StepRequest(2, (11,), pb.DECODE, ROW))
        await at.session.step(StepRequest(3, (12,), pb.DECODE, ROW))
        await at.lose(1)
        await decoded(at, 4)
        assert at.hops[3].rerouted[0].keep_tokens == 2


async def test_a_repeated_step_rolls_nothing_back() -> None:
    async with scene((10, 20), (20, 30), standby=True) as at:
        await at.prefilled()
        await until(lambda: at.hops[1].copies and at.hops[2].copies)
        await at.lose(2)
        assert np.array_equal(await at.session.fetch_row(3), row_of(8, 3)), "its step is sent again"
        await at.lose(1)
        await decoded(at, 4)
        assert at.hops[3].rerouted[-1].keep_tokens == 4


async def test_what_nobody_waited_for_may_have_been_copied_and_is_not_kept() -> None:
    async with scene((10, 20), standby=True) as at:
        await at.prefilled()
        await until(lambda: at.hops[1].copies)
        at.hops[0].answers_steps = False
        await at.session.send(StepRequest(4, (11,), pb.DECODE, ROW))
        assert at.session.rest()
        at.hops[0].answers_steps = True
        await decoded(at, 4)
        await at.lose(1)
        await decoded(at, 5)
        assert at.hops[3].rerouted[0].keep_tokens == 4


async def test_nobody_waits_while_a_hop_may_hold_what_was_rolled_back() -> None:
    """What is copied of it before the step that goes back arrives there would never be told from the rest."""
    async with scene((10, 20), standby=True) as at:
        spare = at.records.pop()
        await at.prefilled()
        at.hops[0].answers_steps = False
        number = await at.session.send(StepRequest(2, (11,), pb.DECODE, ROW))
        at.records.append(spare)
        await asyncio.sleep(3 * keeper.FIRST_PAUSE_SECONDS)
        assert not at.hops[3].opened
        at.hops[0].answers_steps = True
        await at.hops[2].answer(at.hops[0].steps[-1])
        await at.session.answer(number)
        await until(lambda: at.hops[1].copies)


async def test_nobody_waits_while_a_hop_may_hold_what_nobody_waited_for() -> None:
    async with scene((10, 20), standby=True) as at:
        spare = at.records.pop()
        await at.prefilled()
        at.hops[0].answers_steps = False
        await at.session.send(StepRequest(4, (11,), pb.DECODE, ROW))
        assert at.session.rest()
        at.records.append(spare)
        await asyncio.sleep(3 * keeper.FIRST_PAUSE_SECONDS)
        assert not at.hops[3].opened
        at.hops[0].answers_steps = True
        await decoded(at, 4)
        await until(lambda: at.hops[1].copies)


async def test_one_that_is_given_more_and_more_beyond_what_was_rolled_back_is_opened_anew() -> None:
    """Also when every hop has one, and nobody is looked for."""
    async with scene((0, 10), (10, 20), (20, 30), standby=True) as at:
        await at.prefilled()
        await until(lambda: all(hop.copies for hop in at.hops[:3]))
        waiting = int(at.hops[1].copies[0].understudy.peer_id[-1])
        await at.session.step(StepRequest(2, (11,), pb.DECODE, ROW))
        await copied(at, 1, waiting, 600)
        await until(lambda: len(at.hops[1].copies) == 2)


async def test_one_that_is_far_behind_what_was_rolled_back_is_opened_anew() -> None:
    async with scene((10, 20), standby=True) as at:
        await at.prefilled()
        await until(lambda: at.hops[1].copies)
        await at.session.step(StepRequest(2, (11,), pb.DECODE, ROW))
        await copied(at, 1, 3, 600)
        await until(lambda: len(at.hops[3].opened) == 2)


# --- when a node leaves


async def test_a_hop_that_leaves_hands_over_all_it_holds() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        await drains(at, 1)
        await until(lambda: at.peers() == ["peer0", "peer3", "peer2"])
        await decoded(at, 4)
        assert [order.upto_tokens for order in at.hops[1].copies] == [4, 4]
        await until(lambda: at.hops[1].said["Close"] == 1)
        assert not at.avoided.now()
        assert not any(step.replay for step in at.hops[0].steps)
        (handed,) = at.session.recoveries
        assert handed.voluntary and (handed.position, handed.copied_tokens, handed.replayed_tokens) == (4, 4, 0)
        assert "handed over at position 4" in str(handed) and "4 tokens copied before, 0 replayed" in str(handed)


async def test_answers_that_nobody_has_asked_for_yet_are_not_computed_again() -> None:
    async with scene((10, 20)) as at:
        first = await at.session.send(StepRequest(0, TOKENS, pb.PREFILL))
        second = await at.session.send(StepRequest(3, (8,), pb.DECODE, ROW))
        await drains(at, 1)
        await until(lambda: at.peers()[1] == "peer3")
        await at.session.answer(first)
        answer = await at.session.answer(second)
        assert answer.row is not None and answer.row.top_ids[0] == row_of(8, 3).argmax()
        await decoded(at, 4)
        assert [step.start for step in at.hops[0].steps] == [0, 3, 4]
        assert len(at.session.recoveries) == 1


async def test_before_anything_is_computed_there_is_nothing_to_copy() -> None:
    async with scene((10, 20)) as at:
        await drains(at, 1)
        await until(lambda: at.peers()[1] == "peer3")
        await at.prefilled()
        assert not at.hops[1].copies


async def test_several_take_the_layers_of_one_that_leaves() -> None:
    async with scene((0, 15), (15, 30), cuts=(0, 10, 15, 20, 30)) as at:
        await at.prefilled()
        await drains(at, 1)
        await until(lambda: len(at.peers()) == 4)
        await decoded(at, 4)
        assert at.peers() == ["peer0", "peer3", "peer4", "peer2"]
        openings = [at.hops[3].opened[0], at.hops[4].opened[0]]
        assert [(one.run.first, one.run.last) for one in openings] == [(10, 15), (15, 20)]
        assert openings[0].successor.peer_id == "peer4" and openings[1].predecessor.peer_id == "peer3"
        assert sorted(order.understudy.peer_id for order in at.hops[1].copies[:2]) == ["peer3", "peer4"]


async def test_all_hops_may_leave_at_once() -> None:
    async with scene((0, 10), (10, 20), (20, 30)) as at:
        await at.prefilled()
        for hop in range(3):
            await drains(at, hop)
        await until(lambda: at.peers() == ["peer3", "peer4", "peer5"])
        await decoded(at, 4)
        assert not any(step.replay for hop in at.hops for step in hop.steps)


async def test_what_cannot_be_copied_is_replayed() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        holds(at.hops[3], 0)
        at.hops[1].on_copy = lambda copy: [
            pb.Copied(session_id=copy.session_id, understudy=copy.understudy.peer_id, failure="the link is cut")
        ]
        await drains(at, 1)
        await until(lambda: at.peers()[1] == "peer3")
        await decoded(at, 4)
        (handed,) = at.session.recoveries
        assert (handed.copied_tokens, handed.replayed_tokens) == (0, 4)
        assert at.hops[0].rerouted[0].successor_position == 0


async def test_the_answer_to_an_earlier_order_counts_for_nothing() -> None:
    """It may be of a time before the session went back, and has come late."""
    async with scene((10, 20)) as at:
        chain = at.session.chain
        one = Understudy(chain.hops[1], PeerId("peer1"), lambda: None, lambda: None)
        said = pb.Copied(session_id=chain.session_id, understudy="peer1", position=7, done=True)
        for _ in range(2):
            said.order = one.request(chain.session_id, 7).order
            one.note(said)
            assert one.is_settled
        one.request(chain.session_id, 7)
        one.note(said)
        assert not one.is_settled


async def test_what_is_said_of_an_understudy_before_counts_for_nothing() -> None:
    """One that waited on the same node, and was dropped while it was copied to."""
    async with scene((10, 20)) as at:
        chain, orders = at.session.chain, itertools.count(1)
        before, one = (Understudy(chain.hops[1], PeerId("peer1"), lambda: None, lambda: None, orders) for _ in range(2))
        said = pb.Copied(session_id=chain.session_id, understudy="peer1", position=7, done=True, failure="it ended")
        said.order = before.request(chain.session_id, 7).order
        one.note(said)
        one.request(chain.session_id, 7)
        one.note(said)
        assert (one.is_settled, one.copied_tokens, one.failure) == (False, 0, "")


async def test_a_copy_that_takes_too_long_is_not_waited_for() -> None:
    async with scene((10, 20), timeouts=replace(QUICK, hand_over_seconds=0.1)) as at:
        await at.prefilled()
        holds(at.hops[3], 3)
        orders = iter([True, False])  # the second one, in the pause, is not answered

        def some(copy: pb.CopyState) -> Sequence[pb.Copied]:
            peer = copy.understudy.peer_id
            said = pb.Copied(session_id=copy.session_id, understudy=peer, position=copy.upto_tokens, done=True)
            return [said] if next(orders, False) else []

        at.hops[1].on_copy = some
        await drains(at, 1)
        await until(lambda: at.peers()[1] == "peer3")
        await decoded(at, 4)
        assert at.session.recoveries[0].replayed_tokens == 1


async def test_without_anybody_alike_it_stays_and_is_replaced_when_its_node_is_gone() -> None:
    async with scene((10, 20)) as at:
        at.records[3] = at.records[3].model_copy(update={"numerics_id": "other"})
        await at.prefilled()
        await drains(at, 1)
        await decoded(at, 4)
        assert at.peers()[1] == "peer1" and not at.hops[3].opened
        at.network.unreachable.add("peer1")
        await at.lose(1, pb.Error(code=pb.NODE_DRAINING, message="the node leaves"))
        await decoded(at, 5)
        assert at.peers()[1] == "peer3" and "peer1" not in at.avoided.now()


async def test_whoever_comes_while_a_node_leaves_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE_SECONDS", 0.05)
    async with scene((10, 20)) as at:
        spare = at.records.pop()
        await at.prefilled()
        await drains(at, 1)
        await decoded(at, 4)
        at.records.append(spare)
        await until(lambda: at.peers()[1] == "peer3")
        await decoded(at, 5)


async def test_an_understudy_that_dies_while_it_is_given_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE_SECONDS", 0.05)
    async with scene((10, 20), (10, 20)) as at:
        await at.prefilled()
        usual, at.hops[1].on_copy = at.hops[1].on_copy, lambda _copy: []
        await drains(at, 1)
        await until(lambda: at.hops[1].copies)
        waiting = int(at.hops[1].copies[0].understudy.peer_id[-1])
        at.hops[1].on_copy = usual
        at.network.unreachable.add(f"peer{waiting}")
        await at.lose(waiting)
        await until(lambda: at.peers()[1] == f"peer{7 - waiting}")
        await decoded(at, 4)
        assert at.session.recoveries[0].replayed_tokens == 0


async def test_a_hop_that_dies_while_it_copies_is_followed_by_its_understudy() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        holds(at.hops[3], 3)
        at.hops[1].on_copy = lambda _copy: []
        await drains(at, 1)
        await until(lambda: at.hops[1].copies)
        await at.lose(1)
        await decoded(at, 4)
        assert at.peers()[1] == "peer3"
        (recovery,) = at.session.recoveries
        assert not recovery.voluntary and (recovery.copied_tokens, recovery.replayed_tokens) == (3, 1)


async def test_closing_while_it_copies_frees_all() -> None:
    """The scene looks for what is left."""
    async with scene((10, 20)) as at:
        await at.prefilled()
        at.hops[1].on_copy = lambda _copy: []
        await drains(at, 1)
        await until(lambda: at.hops[1].copies)


async def test_closing_in_the_pause_frees_all_and_wakes_who_waits_to_send() -> None:
    async with scene((10, 20)) as at:
        await at.prefilled()
        orders: list[pb.CopyState] = []

        def first(copy: pb.CopyState) -> Sequence[pb.Copied]:
            orders.append(copy)
            peer = copy.understudy.peer_id
            done = pb.Copied(session_id=copy.session_id, understudy=peer, position=copy.upto_tokens, done=True)
            return [done] if len(orders) == 1 else []

        at.hops[1].on_copy = first
        await drains(at, 1)
        await until(lambda: len(orders) == 2)
        stepping = asyncio.create_task(at.session.step(StepRequest(4, (9,), pb.DECODE, ROW)))
        await asyncio.sleep(0)
        await at.session.close()
        with pytest.raises(SwarmError, match="session is closed"):
            await stepping


async def test_when_an_understudy_fails_at_the_last_moment_the_hop_stays_and_another_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE_SECONDS", 0.05)
    async with scene((10, 20)) as at:
        await at.prefilled()
        usual = at.hops[3].on_reroute

        def fails(_route: pb.Reroute) -> Sequence[pb.Rerouted | pb.Error]:
            at.network.unreachable.add("peer3")
            return [pb.Error(code=pb.ENGINE_LOST, message="signal 9")]

        at.hops[3].on_reroute = fails
        await drains(at, 1)
        await until(lambda: at.hops[1].rerouted)
        await decoded(at, 4)
        assert at.peers()[1] == "peer1" and len(at.hops[1].opened) == 1
        at.hops[3].on_reroute = usual
        at.network.unreachable.clear()
        at.avoided.forgive(at.network.places[3].peer_id)
        at.session._keeper._refused.forgive(at.network.places[3].peer_id)  # type: ignore[union-attr]
        await until(lambda: at.peers()[1] == "peer3")
        await decoded(at, 5)

"""The policy with a fake engine and clock: what leaves, in which order, and that nobody starves."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.ids import PeerId, SessionId
from swarm.node.scheduler import MAX_SHARED_ROWS, Group, Policy, Runner, Work

MAX_ROWS = 64
GROUP = Group(0, 0, 10)
OTHER_GROUP = Group(1, 0, 10)


def work(
    session: int,
    number: int = 0,
    *,
    peer: str = "p",
    rows: int = 1,
    chunk: bool = False,
    group: Group = GROUP,
    suspect: bool = False,
) -> Work[int]:
    return Work(SessionId(bytes([session])), PeerId(peer), group, rows, chunk, number, suspect=suspect)


def drained(policy: Policy[int]) -> list[tuple[Work[int], ...]]:
    calls = []
    while call := policy.next():
        calls.append(call)
    return calls


def test_rows_of_many_sessions_share_a_call() -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    for session in range(5):
        policy.push(work(session))
    (call,) = drained(policy)
    assert {item.session for item in call} == {bytes([session]) for session in range(5)}


def test_rows_of_another_context_or_range_do_not_share() -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    policy.push(work(1))
    policy.push(work(2, group=OTHER_GROUP))
    policy.push(work(3, group=Group(0, 0, 5)))
    policy.push(work(4))
    calls = drained(policy)
    assert [len(call) for call in calls] == [2, 1, 1]
    assert all(len({item.group for item in call}) == 1 for call in calls)


def test_chunks_and_rows_never_mix_and_alternate() -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    for number in range(3):
        policy.push(work(1, number, rows=64, chunk=True))
    kinds = []
    for number in range(6):
        policy.push(work(2, number))  # a row waits at all times
        kinds.append(policy.next()[0].chunk)
    assert kinds == [False, True, False, True, False, True]


def test_a_replay_of_many_rows_goes_alone() -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    policy.push(work(1, rows=MAX_SHARED_ROWS + 1))
    policy.push(work(2))
    assert [[item.session[0] for item in call] for call in drained(policy)] == [[2], [1]]


def test_a_suspect_shares_its_call_with_nobody_and_delays_rows_by_one_call() -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    for number in range(2):
        for session in (1, 2):
            policy.push(work(session, number, suspect=True))
        for session in (3, 4):
            policy.push(work(session, number))
    calls = [[item.session[0] for item in call] for call in drained(policy)]
    assert calls == [[3, 4], [1], [3, 4], [2], [1], [2]]


def test_a_chunk_is_not_begun_early() -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    policy.push(work(1, rows=8, chunk=True))
    assert policy.next(rows_only=True) == ()
    assert policy.next()[0].chunk


def test_chunks_are_shared_by_peer_and_not_by_session() -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    for session in range(4):
        for number in range(4):
            policy.push(work(session, number, peer="greedy", rows=64, chunk=True))
    for number in range(4):
        policy.push(work(9, number, peer="modest", rows=64, chunk=True))
    first = [policy.next()[0].peer for _ in range(8)]
    assert Counter(first) == {"greedy": 4, "modest": 4}


def test_sessions_of_one_peer_take_turns() -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    for number in range(3):
        policy.push(work(1, number, rows=8, chunk=True))
    for number in range(3):
        policy.push(work(2, number, rows=8, chunk=True))
    assert [call[0].session[0] for call in drained(policy)] == [1, 2, 1, 2, 1, 2]


def test_who_was_away_has_no_credit() -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    for number in range(100):
        policy.push(work(1, number, peer="early", rows=64, chunk=True))
        policy.next()
    for number in range(4):
        policy.push(work(1, number, peer="early", rows=64, chunk=True))
        policy.push(work(2, number, peer="late", rows=64, chunk=True))
    order = [call[0].peer for call in drained(policy)]
    assert Counter(order[:4]) == {"early": 2, "late": 2}


def test_a_full_call_takes_from_every_peer() -> None:
    policy: Policy[int] = Policy(4)
    for session in range(8):
        policy.push(work(session, peer="crowd"))
    policy.push(work(20, peer="single"))
    assert "single" in {item.peer for item in policy.next()}


def test_dropped_work_is_returned_and_leaves_nothing() -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    policy.push(work(1, 7))
    policy.push(work(1, 8, rows=8, chunk=True))
    assert [item.job for item in policy.drop(SessionId(b"\x01"))] == [7, 8]
    assert len(policy) == 0
    assert policy.next() == ()


WORKS = st.lists(
    st.tuples(
        st.integers(0, 7),  # session; its peer follows from it
        st.integers(1, MAX_ROWS),
        st.booleans(),
        st.booleans(),
        st.booleans(),  # let the engine take a call now
    ),
    max_size=60,
)


@given(WORKS)
def test_everything_leaves_once_in_order_and_within_bounds(works: list[tuple[int, int, bool, bool, bool]]) -> None:
    policy: Policy[int] = Policy(MAX_ROWS)
    calls: list[tuple[Work[int], ...]] = []
    for number, (session, rows, chunk, suspect, take) in enumerate(works):
        group = OTHER_GROUP if session % 3 == 0 else GROUP
        peer = f"p{session % 4}"
        policy.push(work(session, number, peer=peer, rows=rows, chunk=chunk, group=group, suspect=suspect))
        if take:
            calls.append(policy.next())
    calls += drained(policy)
    left = [item for call in calls for item in call]
    assert sorted(item.job for item in left) == list(range(len(works)))
    assert len(policy) == 0
    orders = defaultdict(list)
    for item in left:
        orders[item.session].append(item.job)
    assert all(order == sorted(order) for order in orders.values())
    for call in calls:
        assert call, "something waited, yet the engine was left idle"
        assert len({item.session for item in call}) == len(call)
        assert len({item.group for item in call}) == 1
        assert len(call) == 1 or (not any(item.alone for item in call) and sum(item.rows for item in call) <= MAX_ROWS)


@given(st.integers(1, 6), st.integers(1, 6))
def test_nobody_starves_under_steady_load(n_decoding: int, n_prefilling: int) -> None:
    """Every session has a step waiting at all times; in n rounds each is served about as often as its like."""
    policy: Policy[int] = Policy(MAX_ROWS)
    decoding = [work(session, peer=f"d{session}") for session in range(n_decoding)]
    prefilling = [work(100 + session, peer=f"c{session}", rows=64, chunk=True) for session in range(n_prefilling)]
    for item in decoding + prefilling:
        policy.push(item)
    served: Counter[SessionId] = Counter()
    for _ in range(20 * n_prefilling):
        for item in policy.next():
            served[item.session] += 1
            policy.push(item)
    assert {served[item.session] for item in decoding} == {10 * n_prefilling}
    assert {served[item.session] for item in prefilling} == {10}


class FakeEngine:
    """Takes calls and ends them when told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Work[int], ...]] = []
        self.ends: list[asyncio.Future[None]] = []
        self.called = asyncio.Event()

    async def __call__(self, call: tuple[Work[int], ...]) -> None:
        self.calls.append(call)
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ends.append(end)
        self.called.set()
        await end

    async def wait_calls(self, count: int) -> None:
        while len(self.calls) < count:
            self.called.clear()
            await self.called.wait()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


async def test_steps_that_arrive_together_share_a_call(engine: FakeEngine) -> None:
    async with Runner(Policy[int](MAX_ROWS), engine) as runner:
        runner.submit(work(1))
        runner.submit(work(2))
        await engine.wait_calls(1)
        assert len(engine.calls[0]) == 2
        engine.ends[0].set_result(None)
        await settled()
        assert runner.in_flight == runner.waiting == 0


async def test_the_next_rows_are_ready_while_the_engine_computes(engine: FakeEngine) -> None:
    async with Runner(Policy[int](MAX_ROWS), engine, calls_in_flight=2) as runner:
        for session in (1, 2, 3):
            runner.submit(work(session))
            await settled()
        assert [len(call) for call in engine.calls] == [1, 1]
        runner.submit(work(4))
        engine.ends[0].set_result(None)
        await engine.wait_calls(3)
        assert len(engine.calls[2]) == 2, "what came meanwhile shares a call"
        for end in engine.ends[1:]:
            end.set_result(None)


async def test_nothing_is_committed_behind_a_chunk(engine: FakeEngine) -> None:
    async with Runner(Policy[int](MAX_ROWS), engine, calls_in_flight=2) as runner:
        runner.submit(work(1, rows=8, chunk=True))
        await engine.wait_calls(1)
        runner.submit(work(1, 1, rows=8, chunk=True))
        runner.submit(work(2))
        await settled()
        assert len(engine.calls) == 1
        engine.ends[0].set_result(None)
        await engine.wait_calls(2)
        assert not engine.calls[1][0].chunk, "a row waits for one chunk at most"
        engine.ends[1].set_result(None)
        await engine.wait_calls(3)
        engine.ends[2].set_result(None)


async def test_leaving_cancels_the_calls_under_way(engine: FakeEngine) -> None:
    async with Runner(Policy[int](MAX_ROWS), engine) as runner:
        runner.submit(work(1))
        await engine.wait_calls(1)
    assert engine.ends[0].cancelled()

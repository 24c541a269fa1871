"""Booking, positions, epochs: every way a session goes, its slot comes back."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shim.types import ContextSpec
from swarm.ids import PeerId, SessionId
from swarm.node.sessions import Counts, Neighbour, Route, Session, SessionTable, Slots, Terms
from swarm.protocol import WireError, pb

CONTEXTS = (ContextSpec(2, 100), ContextSpec(1, 1000))
PER_PEER = 2


def terms(context_tokens: int = 100, chunk_tokens: int = 16) -> Terms:
    return Terms((0, 10), context_tokens, chunk_tokens, encoding=pb.F32_LE)


def route(epoch: int = 1) -> Route:
    return Route(epoch, Neighbour(PeerId("client")), None)


def session(context_tokens: int = 100) -> Session:
    return Session(SessionId(bytes(16)), PeerId("client"), terms(context_tokens), route(), slot=0, slot_tokens=100)


def code_of(error: pytest.ExceptionInfo[WireError]) -> int:
    return error.value.code


def test_the_smallest_slot_that_fits_is_booked() -> None:
    slots = Slots((ContextSpec(1, 1000), ContextSpec(2, 100)))
    assert slots.tokens(slots.book(50)) == 100
    assert slots.tokens(slots.book(100)) == 100
    assert slots.tokens(slots.book(100)) == 1000, "a larger one when no smaller is free"


def test_a_full_node_says_so_at_once_and_when_to_come_back() -> None:
    slots = Slots(CONTEXTS)
    slots.book(1000)
    with pytest.raises(WireError) as full:
        slots.book(500)
    assert code_of(full) == pb.NODE_FULL
    assert full.value.retry_after_seconds > 0


def test_what_fits_no_slot_is_another_matter() -> None:
    with pytest.raises(WireError) as too_long:
        Slots(CONTEXTS).book(1001)
    assert code_of(too_long) == pb.CONTEXT_FULL


def test_slots_are_announced_by_size() -> None:
    slots = Slots(CONTEXTS)
    slots.book(10)
    assert [(kind.tokens, kind.total, kind.free) for kind in slots.classes()] == [(100, 2, 1), (1000, 1, 1)]


def test_a_slot_belongs_to_its_context() -> None:
    slots = Slots(CONTEXTS)
    assert [slots.context(slot) for slot in range(3)] == [0, 0, 1]


def test_steps_must_follow_what_is_held() -> None:
    mine = session()
    mine.accept(1, 0, 10)
    mine.accept(2, 10, 5)
    mine.accept(3, 12, 1)  # drops what is above and goes on
    with pytest.raises(WireError) as gap:
        mine.accept(4, 14, 1)
    assert code_of(gap) == pb.GAP
    assert gap.value.position == mine.planned == 13
    assert mine.last_step == 3, "a refused step leaves no trace"


def test_a_step_must_fit() -> None:
    with pytest.raises(WireError) as large:
        session().accept(1, 0, 17)
    assert code_of(large) == pb.TOO_LARGE
    mine = session(context_tokens=20)
    mine.accept(1, 0, 16)
    with pytest.raises(WireError) as full:
        mine.accept(2, 16, 5)
    assert code_of(full) == pb.CONTEXT_FULL


def test_late_frames_are_told_by_epoch_and_number() -> None:
    mine = session()
    mine.accept(5, 0, 1)
    assert mine.is_stale(epoch=1, step=5)
    assert not mine.is_stale(epoch=1, step=6)
    mine.reroute(route(epoch=2))
    assert mine.is_stale(epoch=1, step=99)
    assert not mine.is_stale(epoch=2, step=1), "numbers begin anew in an epoch"
    with pytest.raises(WireError) as stale:
        mine.reroute(route(epoch=2))
    assert code_of(stale) == pb.STALE_EPOCH


def test_a_failed_step_takes_its_successors_along() -> None:
    mine = session()
    mine.accept(1, 0, 10)
    mine.computed(10)
    mine.accept(2, 10, 10)
    mine.lost(0)
    with pytest.raises(WireError):
        mine.accept(3, 20, 1)
    mine.accept(3, 0, 1)


def test_one_peer_can_not_take_all_sessions() -> None:
    table = SessionTable((ContextSpec(8, 100),), PER_PEER)
    for number in range(PER_PEER):
        table.open(SessionId(bytes([number])), PeerId("greedy"), terms(), route())
    with pytest.raises(WireError) as limit:
        table.open(SessionId(b"x"), PeerId("greedy"), terms(), route())
    assert code_of(limit) == pb.LIMIT_REACHED
    table.open(SessionId(b"x"), PeerId("other"), terms(), route())


def test_an_open_id_can_not_be_taken_over() -> None:
    table = SessionTable(CONTEXTS, PER_PEER)
    table.open(SessionId(b"x"), PeerId("client"), terms(), route())
    with pytest.raises(WireError) as taken:
        table.open(SessionId(b"x"), PeerId("thief"), terms(), route())
    assert code_of(taken) == pb.NOT_ALLOWED
    assert table.counts().sessions == 1


class Accounting(RuleBasedStateMachine):
    """Random opening, stepping and closing: what is booked is what is open, and in the end nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(CONTEXTS, PER_PEER)
        self.open: list[Session] = []
        self.number = 0

    @rule(tokens=st.sampled_from([1, 100, 101, 1000, 1001]), peer=st.sampled_from("abc"))
    def opens(self, tokens: int, peer: str) -> None:
        self.number += 1
        before = self.table.counts()
        session_id = SessionId(self.number.to_bytes(16, "big"))
        try:
            self.open.append(self.table.open(session_id, PeerId(peer), terms(tokens), route()))
        except WireError:
            assert self.table.counts() == before

    @rule(which=st.integers(0, 10))
    def computes(self, which: int) -> None:
        if self.open:
            self.open[which % len(self.open)].computed(7)

    @rule(which=st.integers(0, 10))
    def closes(self, which: int) -> None:
        if self.open:
            closed = self.open.pop(which % len(self.open))
            self.table.close(closed)
            self.table.close(closed)  # the second time changes nothing

    @invariant()
    def books_balance(self) -> None:
        counts = self.table.counts()
        assert counts.sessions == counts.slots == len(self.open) == len({one.slot for one in self.open})
        assert all(one.slot_tokens >= one.terms.context_tokens for one in self.open)

    def teardown(self) -> None:
        for one in self.open:
            self.table.close(one)
        assert self.table.counts() == Counts()
        assert all(kind.free == kind.total for kind in self.table.slots.classes())


TestAccounting = Accounting.TestCase

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.record import NodeState, SpanRecord
from swarm.placement.choice import Span, coverage_of, largest_windows
from swarm.placement.moving import Mover, MoveRules, Place
from swarm.placement.turns import Turns
from tests.routing.records import ARTIFACT, CUTS, N_LAYERS, record

NOW = 1_000_500.0  # not in the part of a turn in which nobody leaves
LATER = NOW + 24 * 3600
Spans = dict[str, Span]


def cost(first: int, last: int) -> int:
    return last - first


def mover(peer_id: str, layers: int) -> Mover:
    return Mover(Place(CUTS, ARTIFACT, peer_id, layers, cost))


def records(spans: Spans, state: NodeState = NodeState.ONLINE) -> list[SpanRecord]:
    return [record(peer_id, *span, state=state) for peer_id, span in spans.items()]


def look(who: Mover, spans: Spans, *, waited: float = LATER - NOW) -> Span | None:
    """At NOW and again when it has waited: a gap must last before it is one."""
    me = who.place.peer_id
    who.look(records(spans), spans[me], NOW)
    choice = who.look(records(spans), spans[me], NOW + waited)
    return None if choice is None else (choice.first, choice.last)


def test_a_gap_is_filled_by_a_node_that_nobody_misses() -> None:
    spans = {"me": (0, 5), "a": (0, 5)}
    assert look(mover("me", 5), spans) == (5, 10)


def test_a_gap_that_a_restart_may_close_is_left_alone() -> None:
    assert look(mover("me", 5), {"me": (0, 5), "a": (0, 5)}, waited=30) is None


def test_a_gap_that_a_joiner_has_announced_is_none() -> None:
    who = mover("me", 5)
    found = [*records({"me": (0, 5), "a": (0, 5)}), *records({"b": (5, 10)}, NodeState.JOINING)]
    who.look(found, (0, 5), NOW)
    assert who.look(found, (0, 5), LATER) is None


def test_a_node_that_is_needed_stays() -> None:
    assert look(mover("me", 5), {"me": (0, 5), "a": (5, 10)}) is None
    assert look(mover("me", 5), {"me": (0, 5), "a": (5, 8)}) is None


def test_one_node_at_a_time_goes_to_a_gap() -> None:
    names = [f"n{number}" for number in range(6)]
    spans: Spans = dict.fromkeys(names, (0, 5))
    soon = [name for name in names if look(mover(name, 5), spans, waited=600) is not None]
    assert len(soon) == 1
    assert all(look(mover(name, 5), spans) == (5, 10) for name in names)  # had nobody gone


def test_neighbours_move_up_when_nobody_can_fill_the_gap_alone() -> None:
    spans = {"a": (0, 3), "b": (4, 7), "c": (7, 10), "d": (8, 10)}
    assert look(mover("b", 3), spans) is None
    assert look(mover("c", 3), spans) == (6, 9)
    spans["c"] = (6, 9)
    assert look(mover("b", 3), spans) == (3, 6)


def test_weak_layers_are_lifted_from_strong_ones() -> None:
    spans: Spans = {"me": (0, 5), "a": (0, 5), "b": (0, 5), "c": (5, 10)}
    candidates = {name: look(mover(name, 5), spans) for name in ("me", "a", "b")}
    assert set(candidates.values()) <= {None, (5, 10)}
    assert (5, 10) in candidates.values()


def test_a_single_weak_layer_is_lifted_by_a_wide_window() -> None:
    """Once the rest had been lifted, it was less than a quarter of any window, and stayed weakest for good."""
    spans: Spans = {**{f"n{number}": (0, 5) for number in range(5)}, "x": (0, 9), "y": (0, 9), "z": (9, 10)}
    assert {look(mover(name, 5), spans) for name in spans if name.startswith("n")} >= {(5, 10)}


@pytest.mark.parametrize("spans", [{"me": (0, 5), "a": (0, 5), "b": (5, 10)}, {"me": (0, 5), "a": (0, 10)}], ids=str)
def test_a_small_gain_moves_nobody(spans: Spans) -> None:
    assert look(mover("me", 5), spans) is None


def test_who_has_just_moved_rests() -> None:
    spans: Spans = {"me": (0, 5), "a": (0, 5), "b": (0, 5), "c": (0, 5), "d": (5, 10)}
    first = next(name for name in ("me", "a", "b", "c") if look(mover(name, 5), spans))
    tired = mover(first, 5)
    tired.switched(LATER - 60)
    assert look(tired, spans) is None


def test_nobody_leaves_at_the_beginning_of_a_turn() -> None:
    who, spans = mover("me", 5), {"me": (0, 5), "a": (0, 5), "b": (0, 5), "c": (5, 10)}
    turns = [number * Turns().turn_seconds for number in range(2000, 2040)]
    assert not any(who.may_switch(records(spans), (0, 5), (5, 10), at + 119) for at in turns)
    assert any(who.may_switch(records(spans), (0, 5), (5, 10), at + 121) for at in turns)


def test_a_layer_kept_is_not_left_while_the_swarm_is_whole() -> None:
    """A node that moves is away for as long as loading takes, from what it keeps as well."""
    times = [NOW + number * 600 for number in range(40)]
    whole = {"me": (0, 5), "a": (0, 2), "b": (5, 10)}
    assert not any(mover("me", 5).may_switch(records(whole), (0, 5), (2, 7), at) for at in times)
    gaping = {"me": (0, 5), "a": (0, 2), "b": (6, 10)}
    assert any(mover("me", 5).may_switch(records(gaping), (0, 5), (2, 7), at) for at in times)


SPANS = st.tuples(st.sampled_from(CUTS), st.sampled_from(CUTS)).filter(lambda pair: pair[0] < pair[1])


@settings(max_examples=200, deadline=None)
@given(
    spans=st.lists(SPANS, min_size=2, max_size=8),
    hidden=st.lists(st.sets(st.integers(0, 7)), min_size=8, max_size=8),
    clock=st.integers(0, 10**6),
)
def test_nodes_that_leave_at_once_leave_nothing_bare_whatever_they_have_not_seen(
    spans: list[Span], hidden: list[set[int]], clock: int
) -> None:
    """Each goes if it may, by a view that lacks some of the others, and in which nobody has gone yet."""
    found = [record(f"n{number}", *span) for number, span in enumerate(spans)]
    stay = []
    for number, (span, own) in enumerate(zip(spans, found, strict=True)):
        view = [it for other, it in enumerate(found) if other not in hidden[number]]
        if not Turns().may_leave(own.peer_id, span, range(*span), view, clock):
            stay.append(own)
    before, after = (coverage_of(some, CUTS, ARTIFACT).servers for some in (found, stay))
    assert all(there > 0 for was, there in zip(before, after, strict=True) if was > 0)


@st.composite
def crowds(draw: st.DrawFn) -> tuple[dict[str, int], int]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    return {f"n{number}": size for number, size in enumerate(sizes)}, draw(st.integers(0, 1000))


@settings(max_examples=60, deadline=None)
@given(crowd=crowds())
def test_a_swarm_in_which_nobody_comes_or_goes_comes_to_rest(crowd: tuple[dict[str, int], int]) -> None:
    sizes, seed = crowd
    rng = random.Random(seed)
    spans = {name: rng.choice(largest_windows(CUTS, size, cost)) for name, size in sizes.items()}
    movers = {name: mover(name, size) for name, size in sizes.items()}
    moves = quiet = 0
    now = NOW
    while quiet < 40:
        now += MoveRules().recheck_seconds
        moved = 0
        for name, who in movers.items():
            before = coverage_of(records(spans), CUTS, ARTIFACT).servers
            choice = who.look(records(spans), spans[name], now)
            if choice is not None and who.may_switch(records(spans), spans[name], (choice.first, choice.last), now):
                spans[name] = choice.first, choice.last
                who.switched(now)
                moved += 1
                after = coverage_of(records(spans), CUTS, ARTIFACT).servers
                assert all(there > 0 for was, there in zip(before, after, strict=True) if was > 0)
        moves, quiet = moves + moved, 0 if moved else quiet + 1
        assert moves <= 4 * len(sizes) * N_LAYERS, "it goes to and fro"


@pytest.mark.parametrize("cause", ["no room any more", "could not be loaded"])
def test_a_move_that_became_impossible_makes_room_for_another(cause: str) -> None:
    """Without room for five layers it fills what it can of the gap."""
    room = 5

    def on_disk(first: int, last: int) -> int:
        return last - first if last - first <= room else 6

    who = Mover(Place(CUTS, ARTIFACT, "me", 5, on_disk, cost))
    spans: Spans = {"me": (0, 2), "a": (0, 4), "b": (9, 10)}
    assert look(who, spans) == (4, 9)
    if cause == "no room any more":
        room = 3
        assert look(who, spans) == (4, 7)
    else:
        who.failed((4, 9))
        assert look(who, spans) not in (None, (4, 9))

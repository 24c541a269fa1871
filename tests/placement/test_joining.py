from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dht.record import NodeState
from swarm.placement.choice import Coverage, Span, choose_span
from swarm.placement.moving import Mover, Place
from swarm.placement.turns import order
from tests.routing.records import ARTIFACT, CUTS, record


def cost(first: int, last: int) -> int:
    return last - first


def settled(sizes: list[int], rounds: int) -> list[Span]:
    """All look at an empty swarm at the same moment, announce, and look again as often."""
    names = [f"peer{number}" for number in range(len(sizes))]
    movers = [Mover(Place(CUTS, ARTIFACT, name, size, cost)) for name, size in zip(names, sizes, strict=True)]
    spans: list[Span] = []
    for name, size in zip(names, sizes, strict=True):
        choice = choose_span(CUTS, [], size, cost, artifact_id=ARTIFACT, peer_id=name)
        spans.append((choice.first, choice.last))
    for _ in range(rounds):
        found = [record(name, *span, state=NodeState.JOINING) for name, span in zip(names, spans, strict=True)]
        choices = [mover.look_again(found, span) for mover, span in zip(movers, spans, strict=True)]
        spans = [
            span if choice is None else (choice.first, choice.last) for choice, span in zip(choices, spans, strict=True)
        ]
    return spans


def uncovered(spans: list[Span]) -> tuple[Span, ...]:
    coverage = Coverage.empty(CUTS[-1])
    for span in spans:
        coverage = coverage.plus(*span)
    return coverage.uncovered


def test_five_that_join_at_the_same_moment_share_the_model_after_one_more_look() -> None:
    assert sorted(settled([2] * 5, rounds=1)) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]


def test_an_announced_window_that_nobody_else_has_is_kept() -> None:
    mover = Mover(Place(CUTS, ARTIFACT, "me", 5, cost))
    assert mover.look_again([record("a", 0, 5, state=NodeState.JOINING)], (5, 10)) is None
    assert mover.look_again([], (5, 10)) is None


def test_who_was_there_before_is_not_argued_with() -> None:
    mover = Mover(Place(CUTS, ARTIFACT, "me", 5, cost))
    choice = mover.look_again([record("a", 0, 5)], (0, 5))
    assert choice is not None
    assert (choice.first, choice.last) == (5, 10)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_joiners_of_one_moment_cover_what_their_sum_allows(sizes: list[int]) -> None:
    spans = settled(sizes, rounds=8)
    if sum(sizes) >= CUTS[-1]:
        assert uncovered(spans) == ()
    assert settled(sizes, rounds=9) == spans


def test_a_joiner_whose_disk_is_full_by_now_stays() -> None:
    def full(_first: int, _last: int) -> int:
        return 6

    mover = Mover(Place(CUTS, ARTIFACT, "me", 5, full, cost))
    assert mover.look_again([record("a", 0, 5)], (0, 5)) is None


def test_the_disk_of_others_is_not_taken_for_as_small() -> None:
    """One layer fits this one's disk; of those before it nothing is known but that they hold two."""

    def on_disk(first: int, last: int) -> int:
        return last - first if last - first < 2 else 3

    *before, me = sorted(["a", "b", "c"], key=order)
    found = [record(name, 0, 2, state=NodeState.JOINING) for name in before]
    choice = Mover(Place(CUTS, ARTIFACT, me, 2, on_disk, cost)).look_again([*found, record("d", 6, 10)], (0, 1))
    assert choice is not None
    assert (choice.first, choice.last) == (4, 5)

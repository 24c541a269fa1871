from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.record import NodeState, SpanRecord
from swarm.errors import NotEnoughMemory
from swarm.placement import Choice, Coverage, choose_span, could_leave, coverage_of, plan_swarm
from tests.routing.records import ARTIFACT, CUTS, GLM_CUTS, N_LAYERS, OTHER_ARTIFACT, record

MIB = 1 << 20
SPANS = st.lists(st.sampled_from(CUTS), min_size=2, max_size=2, unique=True).map(sorted)


def per_layer(first: int, last: int) -> int:
    return (last - first) * MIB


def with_ends(first: int, last: int) -> int:
    """Embedding and output weigh as much as two layers."""
    return (last - first + 2 * (first == 0) + 2 * (last == N_LAYERS)) * MIB


def chosen(records: list[SpanRecord], layers: int, *, cuts: tuple[int, ...] = CUTS, peer_id: str = "me") -> Choice:
    return choose_span(cuts, records, layers * MIB, per_layer, artifact_id=ARTIFACT, peer_id=peer_id)


def span(choice: Choice) -> tuple[int, int]:
    return choice.first, choice.last


def test_a_node_that_holds_everything_takes_everything() -> None:
    choice = chosen([], 10)
    assert span(choice) == (0, 10)
    assert (choice.weakest_before, choice.weakest_after, choice.needed_bytes) == (0, 1, 10 * MIB)
    assert choice.reason == "10 layers, 10 of the 10 that nobody serves yet"


def test_the_hole_is_filled() -> None:
    records = [record("a", 0, 4), record("b", 7, 10)]
    assert span(chosen(records, 3)) == (4, 7)
    choice = chosen(records, 5)
    assert choice.first <= 4
    assert choice.last >= 7
    assert choice.last - choice.first == 5


@pytest.mark.parametrize("peer_id", [f"peer{number}" for number in range(8)])
def test_an_empty_swarm_is_filled_without_scraps(peer_id: str) -> None:
    assert span(chosen([], 5, peer_id=peer_id)) in ((0, 5), (5, 10))
    # windows of 4 from the left or from the right
    assert span(chosen([], 4, peer_id=peer_id)) in ((0, 4), (4, 8), (2, 6), (6, 10))


def test_simultaneous_joiners_differ() -> None:
    first = Counter(span(chosen([], 2, peer_id=f"peer{number}")) for number in range(100))
    assert set(first) == {(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)}
    assert span(chosen([], 2, peer_id="peer7")) == span(chosen([], 2, peer_id="peer7"))


def test_joiners_one_after_another_cover_the_model_with_as_few_as_possible() -> None:
    records: list[SpanRecord] = []
    for number in range(4):
        choice = chosen(records, 3, peer_id=f"peer{number}")
        records.append(record(f"peer{number}", *span(choice), state=NodeState.JOINING))
    assert min(coverage_of(records, CUTS, ARTIFACT).servers) == 1


def test_the_second_server_goes_to_the_slowest_layers() -> None:
    records = [
        record("a", 0, 5, decode_tokens_per_second=50),
        record("b", 5, 10, decode_tokens_per_second=2),
    ]
    choice = chosen(records, 5)
    assert span(choice) == (5, 10)
    assert "5 of the 10 with fewest servers (1)" in choice.reason


def test_only_legal_windows_are_chosen() -> None:
    assert span(chosen([record("a", 0, 6)], 5, cuts=GLM_CUTS)) == (6, 10)
    assert span(chosen([record("a", 2, 10)], 3, cuts=GLM_CUTS)) == (0, 2)


@pytest.mark.parametrize(
    "change",
    [{"artifact_id": OTHER_ARTIFACT}, {"state": NodeState.DRAINING}, {"n_layers": 11}, {"peer_id": "me"}],
    ids=str,
)
def test_records_that_will_not_serve_do_not_count(change: dict[str, object]) -> None:
    records = [record("a", 0, 5), record("b", 0, 5), record("c", 5, 10).model_copy(update=change)]
    assert span(chosen(records, 5)) == (5, 10)


def test_a_joining_node_counts() -> None:
    assert span(chosen([record("a", 0, 5, state=NodeState.JOINING)], 5)) == (5, 10)


def test_illegal_records_do_not_count() -> None:
    records = [record("a", 0, 6), record("b", 0, 6), record("x", 5, 10)]
    assert span(chosen(records, 4, cuts=GLM_CUTS)) == (6, 10)


def test_nothing_fits_names_the_smallest_span() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        choose_span(GLM_CUTS, [], MIB // 2, with_ends, artifact_id=ARTIFACT, peer_id="me")
    assert str(caught.value).startswith(
        "not enough memory: the smallest span, layers 1:2, needs 1.0 MiB and 0.5 MiB is usable; free some"
    )
    assert caught.value.exit_code == 5


def test_the_runners_up_are_explained() -> None:
    lines = chosen([record("a", 0, 5)], 5).explain()
    assert lines[0] == "chosen: layers 5:10: 5 layers, 5 of the 5 that nobody serves yet"
    assert len(lines) == 4
    assert lines[1] == "lost: layers 4:9, 5 MiB: 5 layers, 4 of the 5 that nobody serves yet"


@settings(max_examples=200, deadline=None)
@given(spans=st.lists(SPANS, max_size=6), layers=st.integers(1, 12), peer_id=st.text(max_size=5))
def test_no_other_window_raises_the_weakest_layers_more(spans: list[list[int]], layers: int, peer_id: str) -> None:
    records = [record(f"p{number}", *pair) for number, pair in enumerate(spans)]
    choice = chosen(records, layers, peer_id=peer_id)
    assert choice.last - choice.first <= layers
    before = coverage_of(records, CUTS, ARTIFACT)
    reached = sorted(before.plus(choice.first, choice.last).servers)
    for first in CUTS:
        for last in CUTS:
            if first < last <= first + layers:
                assert sorted(before.plus(first, last).servers) <= reached


@given(spans=st.lists(SPANS, max_size=6))
def test_coverage_counts_each_layer(spans: list[list[int]]) -> None:
    coverage = Coverage.empty(N_LAYERS)
    for first, last in spans:
        coverage = coverage.plus(first, last, 2.0)
    assert list(coverage.servers) == [sum(a <= layer < b for a, b in spans) for layer in range(N_LAYERS)]
    holes = {layer for first, last in coverage.uncovered for layer in range(first, last)}
    assert holes == {layer for layer in range(N_LAYERS) if coverage.servers[layer] == 0}


@pytest.mark.parametrize(
    ("others", "free"),
    [
        ([], False),
        ([("b", 0, 10, NodeState.ONLINE)], True),
        ([("b", 0, 4, NodeState.ONLINE), ("c", 4, 10, NodeState.ONLINE)], True),
        ([("b", 0, 4, NodeState.ONLINE), ("c", 5, 10, NodeState.ONLINE)], False),
        ([("b", 0, 10, NodeState.JOINING)], False),
        ([("b", 0, 10, NodeState.DRAINING)], False),
    ],
)
def test_leaving_must_not_uncover_a_layer(others: list[tuple[str, int, int, NodeState]], free: bool) -> None:
    records = [record("me", 2, 8), *(record(peer, a, b, state=state) for peer, a, b, state in others)]
    assert could_leave(records, CUTS, ARTIFACT, "me") is free


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_loads_machines_in_proportion() -> None:
    plan = plan_swarm(CUTS, {"big": 12 * MIB, "small": 4 * MIB}, per_layer)
    assert plan.spans[0] == ("big", 0, 10)  # alone is a chain with fewer hops
    plan = plan_swarm(CUTS, {"big": 9 * MIB, "small": 5 * MIB}, per_layer)
    assert plan.spans == (("big", 0, 7), ("small", 7, 10))  # 7 of 9 and 3 of 5: 6 and 4 would fill the small one
    assert plan.uncovered == ()


def test_further_machines_support_the_weakest_layers() -> None:
    plan = plan_swarm(CUTS, {"a": 6 * MIB, "b": 5 * MIB, "c": 5 * MIB, "d": 5 * MIB}, per_layer)
    coverage = Coverage.empty(N_LAYERS)
    for _, first, last in plan.spans:
        coverage = coverage.plus(first, last)
    assert len(plan.spans) == 4
    assert min(coverage.servers) == 2


def test_machines_that_are_too_small_together_cover_what_they_can() -> None:
    plan = plan_swarm(GLM_CUTS, {"a": 4 * MIB, "b": 1 * MIB, "c": 0}, per_layer)
    assert {name for name, _, _ in plan.spans} == {"a", "b"}
    assert plan.idle == ("c",)
    assert sum(last - first for first, last in plan.uncovered) == 5


@settings(max_examples=150, deadline=None)
@given(layers=st.lists(st.integers(0, 12), min_size=1, max_size=6), cuts=st.sampled_from([CUTS, GLM_CUTS]))
def test_plans_keep_to_cuts_and_memory(layers: list[int], cuts: tuple[int, ...]) -> None:
    budgets = {f"m{number}": size * MIB for number, size in enumerate(layers)}
    plan = plan_swarm(cuts, budgets, with_ends)
    assert {name for name, _, _ in plan.spans} | set(plan.idle) == set(budgets)
    for name, first, last in plan.spans:
        assert first in cuts
        assert last in cuts
        assert with_ends(first, last) <= budgets[name]
    covered = {layer for _, first, last in plan.spans for layer in range(first, last)}
    holes = {layer for first, last in plan.uncovered for layer in range(first, last)}
    assert covered | holes == set(range(N_LAYERS))
    assert not covered & holes

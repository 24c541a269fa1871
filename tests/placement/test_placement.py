from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.record import NodeState, SpanRecord
from swarm.errors import NotEnoughMemory
from swarm.placement.choice import Choice, Coverage, Span, choose_span, choose_window, coverage_of
from tests.routing.records import ARTIFACT, CUTS, GLM_CUTS, N_LAYERS, OTHER_ARTIFACT, record

MIB = 1 << 20
SPANS = st.lists(st.sampled_from(CUTS), min_size=2, max_size=2, unique=True).map(sorted)


def per_layer(first: int, last: int) -> int:
    return (last - first) * MIB


def with_ends(first: int, last: int) -> int:
    """Embedding and output weigh as much as two layers."""
    return (last - first + 2 * (first == 0) + 2 * (last == N_LAYERS)) * MIB


def chosen(
    records: list[SpanRecord],
    layers: int,
    *,
    cuts: tuple[int, ...] = CUTS,
    peer_id: str = "me",
    prefer: Sequence[Span] = (),
) -> Choice:
    return choose_span(cuts, records, layers * MIB, per_layer, artifact_id=ARTIFACT, peer_id=peer_id, prefer=prefer)


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


@pytest.mark.parametrize("peer_id", [f"peer{number}" for number in range(4)])
def test_an_empty_swarm_is_filled_from_the_left(peer_id: str) -> None:
    assert span(chosen([], 5, peer_id=peer_id)) == (0, 5)
    assert span(chosen([], 4, peer_id=peer_id)) == (0, 4)


def test_a_gap_that_is_too_large_for_a_node_is_filled_without_scraps() -> None:
    records = [record("a", 0, 3), record("b", 9, 10)]
    assert span(chosen(records, 4)) == (3, 7)
    assert span(chosen([record("a", 0, 2)], 3, cuts=GLM_CUTS)) == (0, 2)  # 2:6 is too large for it: 3 of 4 layers


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
def test_weakest_layers_are_helped_and_stay_in_one_piece(spans: list[list[int]], layers: int, peer_id: str) -> None:
    records = [record(f"p{number}", *pair) for number, pair in enumerate(spans)]
    choice = chosen(records, layers, peer_id=peer_id)
    assert choice.last - choice.first <= layers
    before = coverage_of(records, CUTS, ARTIFACT)
    after = before.plus(choice.first, choice.last)
    weakest = min(before.servers)
    assert after.servers.count(weakest) < before.servers.count(weakest)
    assert len(weakest_runs(after, weakest)) <= len(weakest_runs(before, weakest))


def weakest_runs(coverage: Coverage, servers: int) -> list[tuple[int, int]]:
    return [run for run, count in coverage.runs() if count == servers]


@st.composite
def swarms(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Legal cuts, bytes of each segment, and nodes' memory in joining order that is just enough in the worst case."""
    weights = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    sizes = st.integers(max(weights), 3 * max(weights))
    memory: list[int] = []
    while sum(least_held(weights, size) for size in memory) < sum(weights):
        memory.append(draw(sizes))
    return tuple(range(len(weights) + 1)), weights, memory


def least_held(weights: list[int], memory: int) -> int:
    """The lightest largest window of a node: the least it covers anywhere but at the end, where it covers the rest."""
    sums = []
    for start in range(len(weights)):
        held = [total for total in accumulate(weights[start:]) if total <= memory]
        if start + len(held) < len(weights):
            sums.append(held[-1])
    return min(sums, default=sum(weights))


@settings(max_examples=300, deadline=None)
@given(swarm=swarms())
def test_joins_in_any_order_cover_the_model_when_the_least_they_hold_adds_up(
    swarm: tuple[tuple[int, ...], list[int], list[int]],
) -> None:
    cuts, weights, memory = swarm
    coverage = Coverage.empty(len(weights))
    for number, size in enumerate(memory):
        choice = choose_window(cuts, coverage, size, lambda a, b: sum(weights[a:b]), tie_break=str(number))
        coverage = coverage.plus(choice.first, choice.last)
    assert coverage.uncovered == ()


def test_what_is_here_already_is_taken_when_it_is_nearly_as_good() -> None:
    records = [record("a", 0, 2)]
    assert span(chosen(records, 4)) == (2, 6)
    assert span(chosen(records, 4, prefer=[(5, 10)])) == (5, 9)  # as many layers that nobody serves
    assert span(chosen([record("a", 0, 6)], 4, prefer=[(0, 4)])) == (6, 10)  # it would help nobody


def test_a_stranger_who_announces_an_absurd_speed_counts_a_few_times_the_median() -> None:
    honest = [record(f"h{number}", 0, 10, decode_tokens_per_second=8) for number in range(3)]
    liar = record("liar", 5, 10, decode_tokens_per_second=1e9)
    speeds = coverage_of([*honest, liar], CUTS, ARTIFACT).tokens_per_second
    assert speeds == (24,) * 5 + (24 + 32,) * 5


def test_a_node_without_a_measured_speed_counts_as_the_median() -> None:
    records = [record("a", 0, 5, decode_tokens_per_second=6), record("b", 5, 10)]
    assert coverage_of(records, CUTS, ARTIFACT).tokens_per_second == (6,) * 10


@given(spans=st.lists(SPANS, max_size=6))
def test_coverage_counts_each_layer(spans: list[list[int]]) -> None:
    coverage = Coverage.empty(N_LAYERS)
    for first, last in spans:
        coverage = coverage.plus(first, last, 2.0)
    assert list(coverage.servers) == [sum(a <= layer < b for a, b in spans) for layer in range(N_LAYERS)]
    holes = {layer for first, last in coverage.uncovered for layer in range(first, last)}
    assert holes == {layer for layer in range(N_LAYERS) if coverage.servers[layer] == 0}

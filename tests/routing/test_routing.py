from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.record import NodeState, SpanRecord
from swarm.errors import ContextExceeded, NoRoute
from swarm.routing import (
    DEFAULT_LAYER_SECONDS,
    DEFAULT_RTT_SECONDS,
    HOP_SECONDS,
    SCARCE_SLOT_SECONDS,
    Chain,
    Gap,
    JoinHint,
    RouteRequest,
    explain,
    invalid_count,
    route,
)
from tests.routing.records import ARTIFACT, CUTS, GLM_CUTS, N_LAYERS, NUMERICS, OTHER_ARTIFACT, record, slots

Edge = tuple[str, str]
Spans = list[tuple[str, int, int]]


def request(**changes: Any) -> RouteRequest:
    values: dict[str, Any] = {"legal_cuts": CUTS, "artifact_id": ARTIFACT, "context_tokens": 100}
    return RouteRequest(**{**values, **changes})


def spans(chain: Chain) -> Spans:
    return [(hop.peer_id, hop.first, hop.last) for hop in chain.hops]


def routed(records: Sequence[SpanRecord], **changes: Any) -> Spans:
    return spans(route(records, request(**changes)))


# --- which chain --------------------------------------------------------------------------------------------------


def test_three_spans_make_a_chain() -> None:
    records = [record("c", 7, 10), record("a", 0, 3), record("b", 3, 7)]
    chain = route(records, request(legal_cuts=CUTS, artifact_id=ARTIFACT, context_tokens=100))
    assert spans(chain) == [("a", 0, 3), ("b", 3, 7), ("c", 7, 10)]
    assert chain.numerics_ids == {NUMERICS}
    assert str(chain) == "a[0:3] -> b[3:7] -> c[7:10]"


def test_overlapping_spans_use_part_of_a_span() -> None:
    assert [first for _, first, _ in routed([record("a", 0, 6), record("b", 4, 10)])] in ([0, 4], [0, 6])


def test_an_overlap_goes_to_the_faster_peer() -> None:
    fast, slow = {"decode_tokens_per_second": 100}, {"decode_tokens_per_second": 1}
    assert routed([record("a", 0, 6, **fast), record("b", 4, 10, **slow)]) == [("a", 0, 6), ("b", 6, 10)]
    assert routed([record("a", 0, 6, **slow), record("b", 4, 10, **fast)]) == [("a", 0, 4), ("b", 4, 10)]


def test_fewer_hops_win_when_all_else_is_equal() -> None:
    parts = [record("a", 0, 5), record("b", 5, 10)]
    assert routed([*parts, record("c", 0, 10)]) == [("c", 0, 10)]


def test_a_fast_chain_beats_a_short_one() -> None:
    slow = record("c", 0, 10, decode_tokens_per_second=1)
    fast = [record(peer, *span, decode_tokens_per_second=50) for peer, span in (("a", (0, 5)), ("b", (5, 10)))]
    assert routed([slow, *fast]) == [("a", 0, 5), ("b", 5, 10)]


def test_a_queue_counts_as_waiting_steps() -> None:
    busy, idle = record("a", 0, 10, queue=3), record("b", 0, 10)
    assert routed([busy, idle]) == [("b", 0, 10)]


def test_the_peer_with_more_free_slots_is_preferred() -> None:
    last, many = record("a", 0, 10, slots=slots((4096, 8, 1))), record("b", 0, 10, slots=slots((4096, 8, 7)))
    assert routed([last, many]) == [("b", 0, 10)]


def test_near_peers_are_preferred_from_either_sides_measurement() -> None:
    entries = [record("a", 0, 5, links={"c": 0.001}), record("b", 0, 5, links={"c": 0.2})]
    assert routed([*entries, record("c", 5, 10)])[0] == ("a", 0, 5)
    entries = [record("a", 0, 5), record("b", 0, 5)]
    assert routed([*entries, record("c", 5, 10, links={"a": 0.2, "b": 0.001})])[0] == ("b", 0, 5)
    assert routed([record("a", 0, 10), record("b", 0, 10)], client_rtt_seconds={"a": 0.3, "b": 0.001})[0][0] == "b"


def test_nobody_is_near_by_saying_so() -> None:
    """Of two that tell different things about the way between them, the slower one is believed."""
    entries = [record("a", 0, 5, links={"c": 0.05}), record("liar", 0, 5, links={"c": 0.0})]
    told = record("c", 5, 10, links={"a": 0.05, "liar": 0.3})
    assert routed([*entries, told])[0] == ("a", 0, 5)
    assert routed([record("liar", 0, 5, links={"c": 0.3}), record("b", 0, 5), record("c", 5, 10)])[0] == ("b", 0, 5)


def test_the_estimate_adds_up() -> None:
    records = [
        record("a", 0, 4, decode_tokens_per_second=50, links={"b": 0.03}, queue=2),
        record("b", 4, 10, slots=slots((4096, 4, 2), (50, 9, 9))),
    ]
    chain = route(records, request(client_rtt_seconds={"a": 0.1}))
    layer = 1 / (50 * 4)  # the only measured peer is the neutral value of the other
    compute = 10 * layer
    waiting = 2 * HOP_SECONDS + 2 * 4 * layer + SCARCE_SLOT_SECONDS * (1 / 1 + 1 / 2)
    network = (0.1 + 0.03 + DEFAULT_RTT_SECONDS) / 2
    assert chain.cost == pytest.approx(compute + waiting + network)


def test_without_measurements_the_default_speed_counts() -> None:
    chain = route([record("a", 0, 10)], request())
    assert chain.cost == pytest.approx(
        10 * DEFAULT_LAYER_SECONDS + HOP_SECONDS + SCARCE_SLOT_SECONDS + DEFAULT_RTT_SECONDS
    )


def test_a_chain_takes_its_smallest_slot_and_chunk() -> None:
    records = [
        record("a", 0, 5, chunk_tokens=128, slots=slots((64, 1, 1), (8192, 1, 1), (65536, 1, 1))),
        record("b", 5, 10, chunk_tokens=512, slots=slots((4096, 0, 0), (16384, 1, 1))),
    ]
    chain = route(records, request(context_tokens=100))
    assert (chain.context_tokens, chain.chunk_tokens) == (8192, 128)


def test_one_numerics_id_is_preferred_to_a_faster_mix() -> None:
    records = [
        record("a", 0, 5),
        record("b", 5, 10),
        record("x", 5, 10, numerics_id="x", decode_tokens_per_second=1000),
        record("y", 0, 5, numerics_id="y", decode_tokens_per_second=1000),
    ]
    assert routed(records) == [("a", 0, 5), ("b", 5, 10)]


def test_the_sessions_numerics_are_kept_where_possible() -> None:
    records = [record("a", 0, 5), record("b", 5, 10), record("x", 5, 10, numerics_id="x")]
    assert routed(records, numerics_id="x") == [("a", 0, 5), ("x", 5, 10)]
    assert routed(records, numerics_id="gone") in ([("a", 0, 5), ("b", 5, 10)], [("a", 0, 5), ("x", 5, 10)])


def test_mixed_numerics_are_used_when_nothing_else_is_there() -> None:
    chain = route([record("a", 0, 5), record("x", 5, 10, numerics_id="x")], request())
    assert chain.numerics_ids == {NUMERICS, "x"}


def test_a_seed_spreads_equal_peers_and_is_repeatable() -> None:
    records = [record(peer, 0, 10) for peer in "abcdef"]
    chosen = [routed(records, seed=seed)[0][0] for seed in range(60)]
    assert set(chosen) == set("abcdef")
    assert chosen == [routed(list(reversed(records)), seed=seed)[0][0] for seed in range(60)]


def test_a_seed_does_not_excuse_a_much_slower_peer() -> None:
    records = [record("a", 0, 10, decode_tokens_per_second=50), record("b", 0, 10, decode_tokens_per_second=20)]
    assert {routed(records, seed=seed)[0][0] for seed in range(60)} == {"a"}


# --- which records are never used -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"artifact_id": OTHER_ARTIFACT},
        {"protocol_version": 2},
        {"state": NodeState.JOINING},
        {"state": NodeState.DRAINING},
        {"n_layers": 11},
        {"first": 10},
        {"last": 11},
        {"slots": ()},
        {"slots": slots((4096, 1, 0))},
        {"slots": slots((99, 5, 5), (4096, 2, 0))},
    ],
    ids=str,
)
def test_a_record_that_can_not_serve_is_not_used(change: dict[str, Any]) -> None:
    broken = record("a", 0, 10, decode_tokens_per_second=1e6).model_copy(update=change)
    slow = record("b", 0, 10, decode_tokens_per_second=0.01)
    assert routed([broken, slow]) == [("b", 0, 10)]
    with pytest.raises((NoRoute, ContextExceeded)):
        routed([broken])


def test_illegal_spans_are_ignored_and_counted() -> None:
    def glm(peer: str, first: int, last: int) -> SpanRecord:
        return record(peer, first, last, decode_tokens_per_second=100 if peer in "xy" else 1)

    records = [glm("a", 0, 2), glm("b", 2, 10), glm("x", 0, 3), glm("y", 3, 10)]
    wanted = request(legal_cuts=GLM_CUTS)
    assert spans(route(records, wanted)) == [("a", 0, 2), ("b", 2, 10)]
    assert invalid_count(records, wanted) == 2
    with pytest.raises(NoRoute):
        route([glm("x", 0, 3), glm("y", 3, 10)], wanted)


def test_banned_peers_and_edges_are_avoided() -> None:
    records = [record("a", 0, 5), record("b", 5, 10), record("c", 5, 10, queue=50)]
    assert routed(records)[1][0] == "b"
    assert routed(records, banned=frozenset({"b"}))[1][0] == "c"
    assert routed(records, banned_edges=frozenset({("a", "b")}))[1][0] == "c"
    assert routed(records, banned_edges=frozenset({("b", "a")}))[1][0] == "b"
    assert routed(records, banned_edges=frozenset({("b", "")}))[1][0] == "c"


def test_a_peer_can_relay_for_an_edge_that_is_broken() -> None:
    # the client reaches only a, and a does not reach b: c runs some layers between them
    records = [record(peer, 0, 10) for peer in "abc"]
    blocked = frozenset({("", "b"), ("", "c"), ("a", "b"), ("a", ""), ("c", "")})
    assert [peer for peer, _, _ in routed(records, banned_edges=blocked)] == ["a", "c", "b"]


def test_a_peer_comes_once() -> None:
    # going back to a would be cheapest: b is much faster in the middle
    slow, fast = {"decode_tokens_per_second": 1}, {"decode_tokens_per_second": 10_000}
    records = [record("a", 0, 10, **slow), record("b", 3, 7, **fast)]
    assert routed(records) == [("a", 0, 10)]


# --- errors ----------------------------------------------------------------------------------------------------------


def test_no_peer_at_all_names_the_command() -> None:
    hint = JoinHint("smollm2", ("/ip4/10.0.0.1/tcp/4001/p2p/Q", "/ip4/10.0.0.2/tcp/4001/p2p/R"))
    with pytest.raises(NoRoute) as caught:
        routed([record("a", 0, 3), record("b", 7, 10)], hint=hint)
    assert caught.value.missing == ((3, 7),)
    assert str(caught.value) == (
        "no peer serves layers 3:7; start one: "
        "swarm-node --model smollm2 --layers 3:7 --initial-peers /ip4/10.0.0.1/tcp/4001/p2p/Q"
    )


def test_every_hole_is_named() -> None:
    with pytest.raises(NoRoute) as caught:
        routed([record("a", 2, 4), record("b", 6, 8)])
    assert caught.value.missing == ((0, 2), (4, 6), (8, 10))
    message = str(caught.value)
    assert "layers 0:2 and 4:6 and 8:10" in message
    assert all(f"--layers {span}" in message for span in ("0:2", "4:6", "8:10"))
    assert caught.value.exit_code == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": slots((4096, 2, 0))}, "every peer that serves layers 5:10 is full; try again later"),
        ({"state": NodeState.JOINING}, "are joining or leaving; try again shortly"),
        ({"peer_id": "banned"}, "failed a moment ago; try again shortly"),
        ({"artifact_id": OTHER_ARTIFACT}, "no peer serves layers 5:10 (1 peers serve another model"),
    ],
)
def test_the_reason_is_remembered(change: dict[str, Any], words: str) -> None:
    records = [record("a", 0, 5), record("b", 5, 10, **{k: v for k, v in change.items() if k != "peer_id"})]
    records[1] = records[1].model_copy(update={k: v for k, v in change.items() if k == "peer_id"})
    with pytest.raises(NoRoute) as caught:
        routed(records, banned=frozenset({"banned"}))
    assert words in str(caught.value)
    assert "swarm-node --model MODEL --layers 5:10 --initial-peers ADDRESS" in str(caught.value)
    assert caught.value.missing == ((5, 10),)


def test_a_context_that_is_too_large_says_which_would_fit() -> None:
    records = [
        record("a", 0, 5, slots=slots((65536, 1, 1))),
        record("b", 5, 10, slots=slots((4096, 4, 4))),
        record("c", 5, 10, slots=slots((8192, 1, 1))),
    ]
    with pytest.raises(ContextExceeded) as caught:
        routed(records, context_tokens=10_000)
    assert "10000 tokens are needed and the peers' slots hold 8192; shorten the prompt" in str(caught.value)
    assert routed(records, context_tokens=8192)[1][0] == "c"


def test_a_hole_counts_more_than_small_slots() -> None:
    with pytest.raises(NoRoute) as caught:
        routed([record("a", 0, 5)], context_tokens=10_000)
    assert caught.value.missing == ((0, 10),)


def test_broken_links_everywhere_say_so() -> None:
    with pytest.raises(NoRoute, match="links between them failed a moment ago") as caught:
        routed([record("a", 0, 5), record("b", 5, 10)], banned_edges=frozenset({("a", "b")}))
    assert caught.value.missing == ()


def test_explain_shows_winner_losers_and_the_left_out() -> None:
    records = [
        record("a", 0, 5, public_name="anna"),
        record("b", 5, 10),
        record("c", 5, 10, queue=9),
        record("d", 5, 10, state=NodeState.DRAINING),
    ]
    lines = explain(records, request())
    assert lines[0].startswith("chosen: anna[0:5] -> b[5:10]  ")
    assert "compute 50.0, network 30.0, waiting 7.0" in lines[0]
    assert lines[1] == "without anna: no chain"
    assert lines[2].startswith("lost: anna[0:5] -> c[5:10]")
    assert lines[2].endswith(": 225.0 ms slower")
    assert lines[3] == "not used: d layers 5:10: is draining"


def test_explain_without_a_chain() -> None:
    lines = explain([record("a", 0, 5, slots=slots((10, 1, 1)))], request())
    assert lines[0].startswith("no chain: no peer serves layers 0:10")
    assert lines[1] == "not used: a layers 0:5: its slots hold 10 tokens, 100 are needed"


# --- properties ------------------------------------------------------------------------------------------------------


PEERS = [f"p{number}" for number in range(6)]


@st.composite
def swarms(draw: st.DrawFn, cuts: tuple[int, ...] = CUTS, most: int = 5) -> list[SpanRecord]:
    found = []
    for number in range(draw(st.integers(1, most))):
        first, last = sorted(draw(st.lists(st.sampled_from(cuts), min_size=2, max_size=2, unique=True)))
        found.append(
            record(
                f"p{number}",
                first,
                last,
                queue=draw(st.integers(0, 3)),
                decode_tokens_per_second=draw(st.sampled_from([0, 1, 5, 40])),
                numerics_id=draw(st.sampled_from(["x", "y"])),
                slots=slots((4096, 4, draw(st.integers(0, 4)))),
                state=draw(st.sampled_from([NodeState.ONLINE] * 5 + [NodeState.DRAINING])),
            )
        )
    return found


def all_chains(records: Sequence[SpanRecord], cuts: Sequence[int], position: int = 0) -> Iterator[Spans]:
    """Every way through the layers, each peer once, at every legal cut."""
    if position == cuts[-1]:
        yield []
        return
    for item in records:
        if item.first <= position < item.last:
            rest = [other for other in records if other is not item]
            for end in cuts:
                if position < end <= item.last:
                    yield from ([(item.peer_id, position, end), *more] for more in all_chains(rest, cuts, end))


def seconds(chain: Spans, records: Sequence[SpanRecord]) -> float:
    """The cost again, in other words."""
    by_id = {item.peer_id: item for item in records}
    per_layer = {
        item.peer_id: 1 / (item.decode_tokens_per_second * (item.last - item.first))
        for item in records
        if item.decode_tokens_per_second
    }
    ranked = sorted(per_layer.values())
    middle = len(ranked) // 2
    median = (ranked[middle] + ranked[~middle]) / 2 if ranked else DEFAULT_LAYER_SECONDS
    total = (len(chain) + 1) * DEFAULT_RTT_SECONDS / 2
    for peer, first, last in chain:
        item = by_id[peer]
        layer = per_layer.get(peer, median)
        total += (last - first) * layer + item.queue * (item.last - item.first) * layer
        total += HOP_SECONDS + SCARCE_SLOT_SECONDS / item.slots[0].free
    return total


def usable(records: Sequence[SpanRecord]) -> list[SpanRecord]:
    return [item for item in records if item.state is NodeState.ONLINE and item.slots[0].free > 0]


def foreign(chain: Spans, records: Sequence[SpanRecord], numerics_id: str | None) -> int:
    ids = {item.peer_id: item.numerics_id for item in records}
    counts = [sum(ids[peer] != wanted for peer, _, _ in chain) for wanted in ([numerics_id] if numerics_id else "xy")]
    return min(counts)


@settings(max_examples=120, deadline=None)
@given(records=swarms(), numerics_id=st.sampled_from([None, "x", "y", "z"]))
def test_the_chain_is_the_best_of_all(records: list[SpanRecord], numerics_id: str | None) -> None:
    _check_best(records, CUTS, numerics_id)


@settings(max_examples=80, deadline=None)
@given(records=swarms(cuts=GLM_CUTS, most=6), numerics_id=st.sampled_from([None, "x"]))
def test_the_chain_is_the_best_of_all_legal_ones(records: list[SpanRecord], numerics_id: str | None) -> None:
    _check_best(records, GLM_CUTS, numerics_id)


def _check_best(records: list[SpanRecord], cuts: tuple[int, ...], numerics_id: str | None) -> None:
    online = usable(records)
    ranked = [(foreign(chain, online, numerics_id), seconds(chain, online)) for chain in all_chains(online, cuts)]
    try:
        chain = route(records, request(legal_cuts=cuts, numerics_id=numerics_id))
    except NoRoute as error:
        assert not ranked
        covered = {layer for item in online for layer in range(item.first, item.last)}
        named = {layer for first, last in error.missing for layer in range(first, last)}
        assert named == set(range(N_LAYERS)) - covered
        return
    found = spans(chain)
    assert chain.cost == pytest.approx(seconds(found, online))
    best_foreign, best_seconds = min(ranked)
    assert foreign(found, online, numerics_id) == best_foreign
    assert chain.cost == pytest.approx(best_seconds)
    _check_valid(found, online, cuts)


def _check_valid(found: Spans, records: Sequence[SpanRecord], cuts: Sequence[int]) -> None:
    by_id = {item.peer_id: item for item in records}
    assert found[0][1] == 0
    assert found[-1][2] == cuts[-1]
    assert all(left[2] == right[1] for left, right in pairwise(found))
    assert all(first in cuts and last in cuts and first < last for _, first, last in found)
    assert all(by_id[peer].first <= first and last <= by_id[peer].last for peer, first, last in found)
    assert len({peer for peer, _, _ in found}) == len(found)


@settings(max_examples=80, deadline=None)
@given(
    records=swarms(most=6),
    edges=st.frozensets(st.tuples(st.sampled_from(["", *PEERS]), st.sampled_from(PEERS))),
)
def test_a_chain_is_found_if_broken_edges_leave_one(records: list[SpanRecord], edges: frozenset[Edge]) -> None:
    online = usable(records)

    def is_whole(chain: Spans) -> bool:
        stations = ["", *(peer for peer, _, _ in chain)]
        return not edges & set(pairwise(stations))

    exists = any(is_whole(chain) for chain in all_chains(online, CUTS))
    try:
        found = routed(records, banned_edges=edges)
    except NoRoute:
        assert not exists
    else:
        assert is_whole(found)
        _check_valid(found, online, CUTS)


@settings(max_examples=60, deadline=None)
@given(records=swarms(), order=st.randoms(use_true_random=False), seed=st.one_of(st.none(), st.integers(0, 9)))
def test_the_order_of_records_does_not_matter(records: list[SpanRecord], order: Any, seed: int | None) -> None:
    shuffled = list(records)
    order.shuffle(shuffled)
    results = []
    for given_records in (records, shuffled):
        try:
            results.append(str(routed(given_records, seed=seed)))
        except NoRoute as error:
            results.append(str(error))
    assert results[0] == results[1]


def test_a_large_swarm_is_routed_quickly() -> None:
    cuts = (0, 1, 2, *range(6, 75, 4), 78)
    records = []
    for number in range(200):
        start = number % (len(cuts) - 1)
        end = min(len(cuts) - 1, start + 1 + number % 3)
        changes = {"n_layers": 78, "decode_tokens_per_second": 1 + number}
        records.append(record(f"p{number}", cuts[start], cuts[end], **changes))
    begin = time.process_time()
    chain = route(records, request(legal_cuts=cuts))
    assert time.process_time() - begin < 2
    _check_valid(spans(chain), records, cuts)


# --- a gap in a chain ---------------------------------------------------------------------------------------------


def test_a_gap_is_filled_between_two_that_stay() -> None:
    records = [record("a", 0, 6), record("b", 3, 7), record("c", 5, 10)]
    assert routed(records, gap=Gap(3, 7, "before", "after")) == [("b", 3, 7)]


def test_a_gap_may_take_several_and_parts_of_spans() -> None:
    records = [record("a", 0, 5), record("c", 5, 10)]
    assert routed(records, gap=Gap(3, 7, "x", "y")) == [("a", 3, 5), ("c", 5, 7)]


def test_a_gap_keeps_to_links_that_work() -> None:
    records = [record("b", 3, 7), record("d", 3, 7, decode_tokens_per_second=1)]
    for edge in (("x", "b"), ("b", "y")):
        assert routed(records, gap=Gap(3, 7, "x", "y"), banned_edges=frozenset({edge})) == [("d", 3, 7)]


def test_a_gap_prefers_the_numerics_of_what_was_there() -> None:
    records = [record("b", 3, 7, numerics_id="other"), record("d", 3, 7, decode_tokens_per_second=1)]
    assert routed(records, gap=Gap(3, 7, "x", "y"), numerics_id=NUMERICS) == [("d", 3, 7)]
    assert routed(records[:1], gap=Gap(3, 7, "x", "y"), numerics_id=NUMERICS) == [("b", 3, 7)]


def test_a_gap_that_nobody_fills_is_named() -> None:
    with pytest.raises(NoRoute, match=r"no peer serves layers 5:7; start one: .*--layers 5:7") as caught:
        routed([record("a", 0, 5), record("c", 8, 10)], gap=Gap(3, 7, "x", "y"))
    assert caught.value.missing == ((5, 7),)


@given(st.lists(st.tuples(st.sampled_from(CUTS), st.sampled_from(CUTS)), max_size=6), st.data())
def test_a_gap_is_filled_exactly(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    records = [record(f"p{i}", min(pair), max(pair)) for i, pair in enumerate(pairs) if pair[0] != pair[1]]
    first = data.draw(st.integers(0, N_LAYERS - 1))
    last = data.draw(st.integers(first + 1, N_LAYERS))
    covered = all(any(one.first <= layer < one.last for one in records) for layer in range(first, last))
    try:
        hops = routed(records, gap=Gap(first, last))
    except NoRoute as error:
        assert not covered and error.missing
    else:
        assert covered
        assert [hops[0][1], *(end for _, _, end in hops)] == [*(begin for _, begin, _ in hops), last]
        assert hops[0][1] == first

"""Hops' clocks mapped to the client's, and the sums over steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.trace import ClockOffset, RecoveryTrace, Spread, TracedHop, summarise, trace_step
from swarm.ids import PeerId
from swarm.protocol import pb


@given(offset=st.integers(0, 10**12), way_there=st.integers(0, 10**6), way_back=st.integers(0, 10**6))
def test_the_error_of_an_offset_is_at_most_half_the_round_trip(offset: int, way_there: int, way_back: int) -> None:
    clock = ClockOffset()
    sent = 10**9
    clock.add(sent, sent + way_there + offset, sent + way_there + way_back)
    assert abs(clock.to_ours(sent + offset) - sent) <= (way_there + way_back) / 2 + 1


def test_the_shortest_round_trip_wins_until_it_is_old() -> None:
    clock = ClockOffset()
    clock.add(0, 1000 + 5, 10)
    clock.add(100, 2000 + 600, 1200)
    assert clock.to_ours(1005) == 5
    assert clock.round_trip_seconds == pytest.approx(10e-6, rel=0.1)
    for _ in range(400):
        clock.add(0, 7000 + 50, 100)
    assert clock.to_ours(7050) == 50


def clock(offset: int) -> ClockOffset:
    made = ClockOffset()
    made.add(0, offset, 0)
    return made


def test_a_step_is_laid_out_on_the_clients_clock() -> None:
    hops = [
        TracedHop(PeerId("a"), (0, 10), clock(1_000_000)),
        TracedHop(PeerId("b"), (10, 30), clock(5_000_000)),
    ]
    answer = pb.Answer(step=3)
    answer.timings.add(hop_index=1, received_us=5_000_900, sent_us=5_001_500, compute_us=500, queue_us=60)
    answer.timings.add(hop_index=0, received_us=1_000_300, sent_us=1_000_700, compute_us=350, serialise_us=20, ipc_us=9)
    trace = trace_step(answer, hops, start=7, n_tokens=1, sent_us=100, answered_us=1_800)
    assert trace.total_us == 1_700
    assert trace.return_us == 300
    assert [(hop.peer_id, hop.network_us, hop.received_us, hop.sent_us) for hop in trace.hops] == [
        ("a", 200, 200, 600),
        ("b", 200, 800, 1_400),
    ]
    assert trace.hops[0].compute_us + trace.hops[0].serialise_us + trace.hops[0].ipc_us == 379


def test_a_hop_number_outside_the_chain_is_passed_over() -> None:
    answer = pb.Answer(step=1)
    answer.timings.add(hop_index=9, received_us=1, sent_us=2)
    assert trace_step(answer, [], 0, 1, 0, 10).hops == ()


def test_spreads_are_medians_and_percentiles_in_milliseconds() -> None:
    assert Spread.of_us(range(0, 101_000, 1000)) == Spread(50.0, 95.0)
    assert Spread.of_us([]) == Spread(0.0, 0.0)


def test_summaries_are_per_hop_in_chain_order() -> None:
    hops = [TracedHop(PeerId("z"), (0, 1), clock(0)), TracedHop(PeerId("a"), (1, 2), clock(0))]
    steps = []
    for number in (1, 2, 3):
        answer = pb.Answer(step=number)
        answer.timings.add(hop_index=0, received_us=10, sent_us=20, compute_us=number * 1000)
        answer.timings.add(hop_index=1, received_us=30, sent_us=40, compute_us=5000)
        steps.append(trace_step(answer, hops, number, 1, 0, 50))
    first, second = summarise(steps)
    assert (first.peer_id, first.compute.p50_ms) == ("z", 2.0)
    assert first.compute.p95_ms == pytest.approx(2.9)
    assert (second.peer_id, second.compute.p50_ms) == ("a", 5.0)


def test_a_recovery_is_told_in_one_line() -> None:
    recovery = RecoveryTrace(
        position=97,
        lost=((PeerId("b"), (2, 4)),),
        came=((PeerId("d"), (2, 4)),),
        story=("peer b (layers 2:4) closed the connection",),
        silent_seconds=0.5,
        planning_seconds=0.2,
        replay_seconds=0.1,
        attempts=1,
        copied_tokens=64,
        replayed_tokens=33,
        recompute_seconds=0.04,
    )
    assert str(recovery) == (
        "recovered at position 97 in 0.30 s (new route 0.20 s, replay 0.10 s, 0.04 s computed again, "
        "attempts 1, last byte of the lost 0.50 s before): peer b (layers 2:4) closed the connection; "
        "taken over: 2:4 by d; 64 tokens copied before, 33 replayed"
    )

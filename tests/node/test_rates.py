"""Requests a minute, by a clock that stands until it is told to go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.ids import PeerId
from swarm.node.config import PerMinute
from swarm.node.rates import Bucket, Rate
from swarm.protocol import WireError, pb

ONE, OTHER = PeerId("one"), PeerId("other")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(rate: Rate, peer: PeerId) -> WireError:
    with pytest.raises(WireError) as caught:
        rate.take(peer)
    assert caught.value.code == pb.LIMIT_REACHED
    return caught.value


def test_a_minutes_worth_at_once_and_then_at_its_pace(clock: Clock) -> None:
    rate = Rate("sessions", PerMinute(6, 100), clock)
    for _ in range(6):
        rate.take(ONE)
    refusal = refused(rate, ONE)
    assert refusal.retry_after_seconds == pytest.approx(10)
    assert refusal.message == "sessions a minute: at most 6 for one peer, again in 10.0 s"
    rate.take(OTHER)  # has its own
    clock.now += 9.9
    assert refused(rate, ONE).retry_after_seconds == pytest.approx(0.1)
    clock.now += 0.11
    rate.take(ONE)
    refused(rate, ONE)


def test_to_be_refused_costs_nothing(clock: Clock) -> None:
    rate = Rate("sessions", PerMinute(1, 100), clock)
    rate.take(ONE)
    for _ in range(1000):
        refused(rate, ONE)
        clock.now += 0.059
    clock.now += 1.1
    rate.take(ONE)


def test_all_peers_together(clock: Clock) -> None:
    rate = Rate("sessions", PerMinute(2, 3), clock)
    for peer in (ONE, ONE, OTHER):
        rate.take(peer)
    refusal = refused(rate, OTHER)
    assert "sessions a minute: at most 3 for all peers" in refusal.message
    assert refusal.retry_after_seconds == pytest.approx(20)


def test_who_could_ask_as_often_as_a_stranger_is_forgotten(clock: Clock) -> None:
    rate = Rate("questions", PerMinute(1, 1_000_000), clock)
    for number in range(10_000):
        rate.take(PeerId(str(number)))
        clock.now += 1
    assert len(rate) < 150  # 60 of them in the last minute


@given(st.integers(1, 100), st.lists(st.floats(0, 100), max_size=200))
def test_no_minute_has_more_than_two_minutes_worth(per_minute: int, pauses: list[float]) -> None:
    now, taken = 0.0, []
    bucket = Bucket(per_minute, now)
    for pause in pauses:
        now += pause
        if bucket.wait_seconds(now) == 0:
            bucket.take(now)
            taken.append(now)
    assert all(sum(at <= other < at + 60 for other in taken) <= 2 * per_minute for at in taken)

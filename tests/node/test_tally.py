"""Histograms, and how steps are counted."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.histogram import Histogram
from swarm.node.tally import Tally
from swarm.protocol import pb


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 7):
        histogram.observe(value)
    assert histogram.cumulative() == [(1, 2), (2, 4), (inf, 5)]
    assert (histogram.count, histogram.sum) == (5, 12)


@given(st.lists(st.floats(0, 20)), st.lists(st.floats(0, 20)))
def test_a_sum_is_what_one_would_have_seen(left: list[float], right: list[float]) -> None:
    first, second, both = Histogram(range(10)), Histogram(range(10)), Histogram(range(10))
    for histogram, values in ((first, left), (second, right), (both, left + right)):
        for value in values:
            histogram.observe(value)
    assert (first + second).cumulative() == both.cumulative()
    assert (first + second).sum == pytest.approx(both.sum)


def test_what_is_recomputed_is_no_new_token() -> None:
    tally = Tally()
    prefill = pb.Step(kind=pb.PREFILL, n_tokens=16)
    tally.called([prefill], 16, 2, 0.2, 0.001)
    tally.called([pb.Step(kind=pb.DECODE, n_tokens=1), pb.Step(kind=pb.DECODE, n_tokens=2)], 3, 2, 0.1, 0.001)
    tally.called([pb.Step(kind=pb.PREFILL, n_tokens=8, replay=True)], 8, 2, 0.1, 0.001)
    assert tally.tokens == {"prefill": 16, "decode": 3, "replay": 8}
    assert tally.call_rows.sum == 27
    assert (tally.call_sessions.count, tally.call_sessions.sum) == (3, 4)
    assert tally.compute.sum == pytest.approx(0.4)

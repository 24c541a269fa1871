"""Summing up a row, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from shim.engine import summarise
from shim.types import SummarySpec

ROWS = st_np.arrays(np.float32, st.integers(1, 300), elements=st.floats(-60, 60, width=32))


@given(row=ROWS, temperature=st.floats(0.05, 4), data=st.data())
def test_summary(row: np.ndarray, temperature: float, data: st.DataObject) -> None:
    top = data.draw(st.integers(0, len(row)))
    found = summarise(row, SummarySpec(temperature, top))
    order = np.argsort(-row, kind="stable")
    np.testing.assert_array_equal(found.top_ids, order[:top])
    np.testing.assert_array_equal(found.top_logits, row[order[:top]])
    if top == len(row):
        assert found.rest_log_sum_exp == -math.inf
    else:
        rest = row[order[top:]].astype(np.float64) / np.float32(temperature)
        expected = rest.max() + math.log(np.exp(rest - rest.max()).sum())
        assert found.rest_log_sum_exp == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_ties_ascend_by_id() -> None:
    row = np.array([1, 3, 2, 3, 3, 2], np.float32)
    assert summarise(row, SummarySpec(1.0, 4)).top_ids.tolist() == [1, 3, 4, 2]


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_none_counts_as_one(temperature: float) -> None:
    row = np.array([1, 2, 3], np.float32)
    expected = summarise(row, SummarySpec(1.0, 1)).rest_log_sum_exp
    assert summarise(row, SummarySpec(temperature, 1)).rest_log_sum_exp == expected

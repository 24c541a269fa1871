"""Putting rows of sessions into one call and taking the result apart again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shim.types import RowSummary, StepResult, SummarySpec
from swarm.node.batch import Rows, assemble, separate, want_flags, wanted

WIDTH = 3


def entry_rows(slot: int, start: int, count: int, want: bool) -> Rows:
    tokens = np.arange(start, start + count, dtype=np.int32)
    flags = want_flags(count, all_rows=want, last_row=True)
    return Rows((0, 4), slot, start, count, tokens, None, flags, SummarySpec(top=slot), tiled=False)


def middle_rows(slot: int, start: int, count: int) -> Rows:
    hidden = np.full((count, WIDTH), slot, np.float32)
    return Rows((1, 2), slot, start, count, None, hidden, None, SummarySpec(), tiled=False)


PARTS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5), st.booleans()), min_size=1, max_size=6)


@given(PARTS)
def test_hidden_states_come_back_to_their_session(parts: list[tuple[int, int, bool]]) -> None:
    rows = [middle_rows(slot, start, count) for slot, (start, count, _) in enumerate(parts)]
    batch, summaries = assemble(rows)
    assert batch.want is None and batch.tokens is None and summaries == ()
    assert batch.hidden is not None
    result = StepResult(hidden=batch.hidden + 0.5)
    for part, mine in zip(rows, separate(result, rows), strict=True):
        assert mine.hidden is not None and part.hidden is not None
        np.testing.assert_array_equal(mine.hidden, part.hidden + 0.5)


@given(PARTS)
def test_summaries_come_back_to_their_session(parts: list[tuple[int, int, bool]]) -> None:
    rows = [entry_rows(slot, start, count, want) for slot, (start, count, want) in enumerate(parts)]
    batch, specs = assemble(rows)
    assert batch.tokens is not None and batch.want is not None
    np.testing.assert_array_equal(batch.tokens, batch.position)
    assert len(specs) == np.count_nonzero(batch.want)
    made = [
        RowSummary(np.array([spec.top], np.int32), np.zeros(1, np.float32), 0.0, np.zeros(0, np.float32))
        for spec in specs
    ]
    for part, mine in zip(rows, separate(StepResult(summaries=made), rows), strict=True):
        assert [summary.top_ids[0] for summary in mine.summaries] == [part.slot] * wanted(part)


def test_rows_of_a_slot_are_consecutive_and_ascend() -> None:
    batch, _ = assemble([middle_rows(2, 7, 3), middle_rows(0, 4, 1)])
    assert batch.slot.tolist() == [2, 2, 2, 0]
    assert batch.position.tolist() == [7, 8, 9, 4]
    assert batch.slot.dtype == batch.position.dtype == np.int32

"""Positions, rollback, capacity and the kept row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shim.engine import Engine
from shim.errors import BadStep, SlotFull
from shim.types import ContextSpec, EngineConfig, Floats, StepBatch, SummarySpec
from tests.shim.steps import config, token_rows

RUN = (0, 6)


@pytest.fixture
def engine(llama_untied_path: Path) -> Iterator[Engine]:
    with Engine.open(config(llama_untied_path, slots=3, tokens=20)) as engine:
        yield engine


def logits(engine: Engine, tokens: list[int], position: int = 0, slot: int = 0) -> Floats:
    [row] = engine.logits_step(token_rows(RUN, tokens, position, slot=slot, want=[len(tokens) - 1]))
    return np.asarray(row)


def test_a_step_drops_what_the_slot_holds_from_its_position_on(engine: Engine) -> None:
    logits(engine, [1, 2, 3, 4])
    expected = logits(engine, [9], 4)
    logits(engine, [7, 8, 9], 4)
    assert engine.position(0) == 7
    np.testing.assert_array_equal(logits(engine, [9], 4), expected)
    assert engine.position(0) == 5


def test_truncate_then_continue(engine: Engine) -> None:
    expected = logits(engine, [1, 2, 3, 4])
    logits(engine, [5, 6, 7], 4)
    engine.truncate(0, 3)
    assert engine.position(0) == 3
    np.testing.assert_array_equal(logits(engine, [4], 3), expected)


def test_truncate_above_the_position_changes_nothing(engine: Engine) -> None:
    logits(engine, [1, 2])
    engine.truncate(0, 15)
    assert engine.position(0) == 2


def test_bad_truncate(engine: Engine) -> None:
    for slot, position in ((0, -1), (3, 0), (-1, 0)):
        with pytest.raises(BadStep):
            engine.truncate(slot, position)
    with pytest.raises(BadStep):
        engine.position(3)


def test_slots_are_independent(engine: Engine) -> None:
    expected = logits(engine, [1, 2, 3], slot=0)
    logits(engine, [4, 5, 6, 7], slot=1)
    np.testing.assert_array_equal(logits(engine, [1, 2, 3], slot=2), expected)
    engine.truncate(1, 0)
    assert [engine.position(slot) for slot in range(3)] == [3, 0, 3]


def test_capacity_is_what_the_spec_says(engine: Engine) -> None:
    logits(engine, list(range(1, 21)))
    assert engine.position(0) == 20
    with pytest.raises(SlotFull, match="20 tokens"):
        logits(engine, [1], 20)


def test_contexts_of_different_sizes(llama_untied_path: Path) -> None:
    contexts = (ContextSpec(2, 10), ContextSpec(1, 700))
    with Engine.open(EngineConfig(llama_untied_path, contexts=contexts)) as engine:
        assert engine.info.slot_tokens == (10, 10, 700)
        long = [1 + i % 200 for i in range(600)]
        expected = logits(engine, [1, 2, 3], slot=0)
        logits(engine, long[:512], slot=2)
        logits(engine, long[512:], 512, slot=2)
        engine.truncate(2, 0)
        np.testing.assert_array_equal(logits(engine, [1, 2, 3], slot=2), expected)


def test_more_slots_than_rows_in_a_chunk(llama_untied_path: Path) -> None:
    with Engine.open(config(llama_untied_path, slots=16, tokens=64, chunk_tokens=4)) as engine:
        expected = logits(engine, [1, 2, 3])
        np.testing.assert_array_equal(logits(engine, [1, 2, 3], slot=15), expected)


def test_the_last_wanted_row_is_kept_until_the_next_step(engine: Engine) -> None:
    with pytest.raises(BadStep, match="keeps no row"):
        engine.row(0)
    full = engine.logits_step(token_rows(RUN, [1, 2, 3], want=[0, 1]))
    np.testing.assert_array_equal(engine.row(0), full[1])
    engine.logits_step(token_rows(RUN, [1, 2], slot=1, want=[1]))
    np.testing.assert_array_equal(engine.row(0), full[1])
    engine.logits_step(token_rows(RUN, [4], 3, want=[]))
    with pytest.raises(BadStep):
        engine.row(0)


def test_emptying_a_slot_drops_its_row(engine: Engine) -> None:
    logits(engine, [1, 2, 3])
    engine.truncate(0, 0)
    with pytest.raises(BadStep):
        engine.row(0)


def test_rows_come_in_the_order_of_the_step(engine: Engine) -> None:
    expected = {slot: logits(engine, [1, 2 + slot, 3], slot=slot) for slot in range(3)}
    for slot in range(3):
        engine.truncate(slot, 0)
    order = [2, 0, 1]
    batch = StepBatch(
        RUN,
        slot=np.repeat(np.array(order, np.int32), 3),
        position=np.tile(np.arange(3, dtype=np.int32), 3),
        tokens=np.array([token for slot in order for token in (1, 2 + slot, 3)], np.int32),
        want=np.tile(np.array([0, 0, 1], np.uint8), 3),
    )
    found = engine.logits_step(batch)
    for row, slot in enumerate(order):
        np.testing.assert_array_equal(found[row], expected[slot])
        np.testing.assert_array_equal(engine.row(slot), expected[slot])


def test_a_chunk_without_wanted_rows(engine: Engine) -> None:
    expected = logits(engine, [1, 2, 3, 4])
    engine.truncate(0, 0)
    result = engine.step(token_rows(RUN, [1, 2, 3], want=[]))
    assert result.hidden is None
    assert result.summaries == ()
    assert engine.position(0) == 3
    np.testing.assert_array_equal(logits(engine, [4], 3), expected)


def test_no_more_rows_are_wanted_than_there_is_room_for(llama_untied_path: Path) -> None:
    few = replace(config(llama_untied_path, slots=3, tokens=64, chunk_tokens=32), wanted_rows=2)
    with Engine.open(few) as engine, Engine.open(replace(few, wanted_rows=None)) as plain:
        tokens = list(range(1, 31))
        with pytest.raises(BadStep, match="up to 3 wanted rows"):
            engine.logits_step(token_rows(RUN, tokens, want=range(4)))
        assert engine.position(0) == 0
        wanted = token_rows(RUN, tokens, want=[3, 4, 29], tiled=True)
        np.testing.assert_array_equal(engine.logits_step(wanted), plain.logits_step(wanted))
        assert engine.info.compute_bytes < plain.info.compute_bytes


def test_summary_of_a_row(engine: Engine) -> None:
    spec = SummarySpec(temperature=0.7, top=10, ids=(3, 0))
    result = engine.step(token_rows(RUN, [1, 2], want=[0, 1]), [SummarySpec(top=1), spec])
    first, last = result.summaries
    assert len(first.top_ids) == 1
    row = engine.row(0).astype(np.float64)
    order = np.argsort(-row, kind="stable")
    np.testing.assert_array_equal(last.top_ids, order[:10])
    np.testing.assert_array_equal(last.top_logits, engine.row(0)[order[:10]])
    np.testing.assert_array_equal(last.asked, engine.row(0)[[3, 0]])
    rest = np.log(np.exp(row[order[10:]] / 0.7).sum())
    assert last.rest_log_sum_exp == pytest.approx(rest, abs=1e-5)


def test_memory_is_told_apart(llama_untied_path: Path) -> None:
    with Engine.open(config(llama_untied_path, slots=2)) as whole, Engine.open(config(llama_untied_path, 2, 4)) as part:
        full, span = whole.info, part.info
    per_layer = 4 * (2 * 128 + 128 * 128 * 2 + 64 * 128 * 2 + 3 * 128 * 256)
    rope_factors = 4 * 16  # every layer's
    assert span.weights_bytes == 2 * per_layer + rope_factors
    assert full.weights_bytes == 6 * per_layer + 4 * (2 * full.n_vocab * 128 + 128) + rope_factors
    assert full.kv_bytes == 6 * 2 * 256 * (64 + 64) * 2
    assert span.kv_bytes == 2 * 1 * 256 * (64 + 64) * 2
    assert full.output_bytes == 2 * full.n_vocab * 4
    assert span.output_bytes == 128 * 4
    assert full.compute_bytes > span.compute_bytes > 0
    assert not span.is_entry and not span.is_exit

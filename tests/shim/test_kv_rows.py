"""KV rows out of one engine and into another: they stand for the computation, bit by bit, and nothing half written is
ever computed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shim.engine import Engine
from shim.errors import BadStep, SlotFull, StepGap
from shim.process import EngineProcess
from shim.types import ContextSpec, EngineConfig, Floats, KvRowBytes, KvType, StepBatch
from tests.models import GLM_TOP_K
from tests.shim.steps import config, prompt, run_whole, token_rows, with_hidden

DECODED = 3
HELD = 40


def copy_rows(source: Engine, target: Engine, layers: Sequence[int], first: int, last: int, to_slot: int = 0) -> None:
    for layer in layers:
        target.kv_write(to_slot, layer, first, source.kv_read(0, layer, first, last - first))


def decode(engine: Engine, tokens: Sequence[int], position: int, slot: int = 0) -> Floats:
    """Logits of each token, decoded one by one."""
    run = (0, engine.info.n_layers)
    rows = [token_rows(run, [token], position + i, slot=slot, want=[0]) for i, token in enumerate(tokens)]
    return np.concatenate([engine.logits_step(row) for row in rows])


@pytest.mark.parametrize("kv_type", KvType)
@pytest.mark.parametrize(
    ("fixture", "length"),
    [("smollm2_path", 70), ("llama_untied_path", 300), ("glm_random_ud_path", 2 * GLM_TOP_K + 9)],
)
def test_decode_goes_on_with_the_same_bits(
    fixture: str, length: int, kv_type: KvType, request: pytest.FixtureRequest
) -> None:
    """In another engine, another slot of it, beside another session, in two blocks."""
    path = request.getfixturevalue(fixture)
    ours = EngineConfig(path, contexts=(ContextSpec(1, 512),), kv_type=kv_type)
    theirs = EngineConfig(path, contexts=(ContextSpec(3, 512),), kv_type=kv_type)
    with Engine.open(ours) as source, Engine.open(theirs) as target:
        info = source.info
        tokens = prompt(length + DECODED, info.n_vocab)
        run_whole(source, tokens[:length])
        run_whole(target, prompt(20, info.n_vocab, seed=1), slot=1)
        for first, last in ((0, 33), (33, length)):
            copy_rows(source, target, range(info.n_layers), first, last, to_slot=2)
        assert target.position(2) == length
        expected = decode(source, tokens[length:], length)
        np.testing.assert_array_equal(decode(target, tokens[length:], length, slot=2), expected)


@pytest.mark.parametrize(("target_first", "first", "last"), [(1, 2, 6), (1, 1, 2), (2, 6, 10)])
def test_spans_that_overlap(glm_random_f32_path: Path, target_first: int, first: int, last: int) -> None:
    """The target's span holds other layers as well; the session runs [first, last) in both."""
    length = 2 * GLM_TOP_K
    end = last if last < 10 else None
    with (
        Engine.open(config(glm_random_f32_path, 0, 6)) as entry,
        Engine.open(config(glm_random_f32_path, first, end)) as source,
        Engine.open(config(glm_random_f32_path, target_first, None, slots=2)) as target,
    ):
        tokens = prompt(length + 1, entry.info.n_vocab)
        rows = token_rows((0, first), tokens[:length])
        hidden = entry.step(rows).hidden
        assert hidden is not None
        run_rows(source, with_hidden(rows, (first, last), hidden, want=[]))
        copy_rows(source, target, range(first, last), 0, length, to_slot=1)

        row = token_rows((0, first), tokens[length:], length)
        hidden = entry.step(row).hidden
        assert hidden is not None
        expected = run_rows(source, with_hidden(row, (first, last), hidden, want=[0]))
        moved = with_hidden(token_rows((0, first), tokens[length:], length, slot=1), (first, last), hidden, want=[0])
        np.testing.assert_array_equal(run_rows(target, moved), expected)


def run_rows(engine: Engine, batch: StepBatch) -> Floats:
    """Hidden states or logits, whichever the run gives."""
    if batch.run[1] == engine.info.n_layers:
        return engine.logits_step(batch)
    hidden = engine.step(replace(batch, want=None)).hidden
    assert hidden is not None
    return hidden


@pytest.fixture(scope="module")
def source(llama_untied_path: Path) -> Iterator[Engine]:
    with Engine.open(config(llama_untied_path)) as engine:
        run_whole(engine, prompt(HELD, engine.info.n_vocab))
        yield engine


@pytest.fixture
def target(llama_untied_path: Path) -> Iterator[Engine]:
    with Engine.open(config(llama_untied_path, slots=2, tokens=50)) as engine:
        yield engine


def test_row_bytes(source: Engine, glm_random_f32_path: Path) -> None:
    assert source.kv_row_bytes(5) == KvRowBytes(keys=128, values=128, indexer_keys=0)
    with Engine.open(EngineConfig(glm_random_f32_path, kv_type=KvType.Q8_0)) as engine:
        assert engine.kv_row_bytes(6) == KvRowBytes(keys=320 // 32 * 34, values=0, indexer_keys=128 // 32 * 34)
        assert engine.kv_row_bytes(7) == KvRowBytes(keys=320 // 32 * 34, values=0, indexer_keys=0)
        assert engine.kv_row_bytes(7).total == 340
        with pytest.raises(BadStep):
            engine.kv_row_bytes(10)  # the MTP block is not loaded


def test_layout_is_one_tensor_after_the_other(source: Engine) -> None:
    whole = source.kv_read(0, 2, 10, 8)
    one_by_one = [source.kv_read(0, 2, 10 + i, 1) for i in range(8)]
    keys = np.concatenate([row[:128] for row in one_by_one])
    values = np.concatenate([row[128:] for row in one_by_one])
    np.testing.assert_array_equal(whole, np.concatenate([keys, values]))
    assert np.abs(keys.view(np.float16)).max() > 0
    assert np.abs(values.view(np.float16)).max() > 0


def test_a_step_needs_every_layer_of_its_run(source: Engine, target: Engine) -> None:
    copy_rows(source, target, range(5), 0, HELD)
    assert target.position(0) == HELD
    with pytest.raises(StepGap, match="holds 0 tokens"):
        decode(target, [1], HELD)
    copy_rows(source, target, [5], 0, HELD - 1)
    with pytest.raises(StepGap, match=f"holds {HELD - 1} tokens"):
        decode(target, [1], HELD)
    copy_rows(source, target, [5], HELD - 1, HELD)
    np.testing.assert_array_equal(decode(target, [1], HELD), decode(source, [1], HELD))
    source.truncate(0, HELD)


def test_a_shorter_run_leaves_nothing_to_a_longer_one(target: Engine) -> None:
    """What an earlier session left in the layers above is neither computed on nor handed out."""
    run_whole(target, prompt(20, 200))
    target.truncate(0, 0)
    target.step(token_rows((0, 3), prompt(10, 200)))
    with pytest.raises(StepGap):
        decode(target, [1], 10)
    with pytest.raises(StepGap):
        target.kv_read(0, 3, 0, 10)
    assert len(target.kv_read(0, 2, 0, 10)) == 10 * 256


def test_write_drops_what_the_layer_holds_above(source: Engine, target: Engine) -> None:
    run_whole(target, prompt(45, 200, seed=3))
    for layer in range(6):
        target.kv_write(0, layer, 0, source.kv_read(0, layer, 0, 30))
    with pytest.raises(StepGap, match="holds 30 tokens"):
        decode(target, [1], 31)
    with pytest.raises(BadStep):
        target.row(0)
    expected = decode(source, [1, 2], 30)
    np.testing.assert_array_equal(decode(target, [1, 2], 30), expected)
    assert target.position(0) == 32
    run_whole(source, prompt(HELD, 200))


def test_truncate_after_a_write(source: Engine, target: Engine) -> None:
    copy_rows(source, target, range(6), 0, HELD)
    target.truncate(0, 25)
    with pytest.raises(StepGap):
        target.kv_read(0, 0, 0, 26)
    np.testing.assert_array_equal(target.kv_read(0, 4, 5, 20), source.kv_read(0, 4, 5, 20))
    with pytest.raises(StepGap):
        target.kv_write(0, 0, 26, source.kv_read(0, 0, 26, 1))
    copy_rows(source, target, range(6), 25, HELD)
    expected = decode(source, [1], HELD)
    source.truncate(0, HELD)
    np.testing.assert_array_equal(decode(target, [1], HELD), expected)


@pytest.mark.parametrize(
    ("error", "slot", "layer", "first", "count"),
    [
        (BadStep, 1, 0, 0, 1),
        (BadStep, -1, 0, 0, 1),
        (BadStep, 0, 6, 0, 1),
        (BadStep, 0, -1, 0, 1),
        (BadStep, 0, 2**31 - 1, 0, 1),
        (BadStep, 0, 0, -1, 1),
        (BadStep, 0, 0, 0, 0),
        (BadStep, 0, 0, 0, -1),
        (BadStep, 0, 0, 0, 2**31 - 1),
        (StepGap, 0, 0, 0, HELD + 1),
        (StepGap, 0, 0, HELD, 1),
        (SlotFull, 0, 0, 2**31 - 1, 1),
        (SlotFull, 0, 0, 256, 1),
    ],
)
def test_bad_reads(source: Engine, error: type[Exception], slot: int, layer: int, first: int, count: int) -> None:
    with pytest.raises(error):
        source.kv_read(slot, layer, first, count)


@pytest.mark.parametrize(
    ("error", "slot", "layer", "first", "n_bytes"),
    [
        (BadStep, 2, 0, 0, 256),
        (BadStep, 0, 6, 0, 256),
        (BadStep, 0, 0, -1, 256),
        (BadStep, 0, 0, 0, 0),
        (BadStep, 0, 0, 0, 255),
        (BadStep, 0, 0, 0, 257),
        (BadStep, 0, 0, 0, 51 * 256),  # more than the slot has room for
        (StepGap, 0, 0, 1, 256),
        (SlotFull, 0, 0, 1, 50 * 256),
        (SlotFull, 0, 0, 2**31 - 1, 256),
    ],
)
def test_bad_writes(target: Engine, error: type[Exception], slot: int, layer: int, first: int, n_bytes: int) -> None:
    with pytest.raises(error):
        target.kv_write(slot, layer, first, bytes(n_bytes))
    assert target.position(0) == 0


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kv_type", KvType)
def test_values_that_are_not_finite(glm_random_f32_path: Path, kv_type: KvType, value: float) -> None:
    with Engine.open(EngineConfig(glm_random_f32_path, 0, 1, kv_type=kv_type)) as engine:
        widths = engine.kv_row_bytes(0)
        scalar = np.array(value, np.float32 if kv_type is KvType.F32 else np.float16).tobytes()
        step = {KvType.F32: 4, KvType.F16: 2, KvType.Q8_0: 34}[kv_type]
        for offset in (0, 5 * widths.keys - step, 5 * widths.keys, 5 * widths.total - step):
            data = bytearray(5 * widths.total)
            data[offset : offset + len(scalar)] = scalar
            with pytest.raises(BadStep, match="not finite"):
                engine.kv_write(0, 0, 0, data)
        assert engine.position(0) == 0


async def test_the_worker_process_answers_alike(source: Engine, llama_untied_path: Path) -> None:
    async with await EngineProcess.start(config(llama_untied_path)) as engine:
        assert await engine.kv_row_bytes(0) == source.kv_row_bytes(0)
        for layer in range(6):
            await engine.kv_write(0, layer, 0, source.kv_read(0, layer, 0, HELD))
        assert await engine.position(0) == HELD
        np.testing.assert_array_equal(await engine.kv_read(0, 3, 7, 20), source.kv_read(0, 3, 7, 20))
        with pytest.raises(StepGap):
            await engine.kv_read(0, 3, 7, HELD)
        with pytest.raises(BadStep):
            await engine.kv_write(0, 3, 0, b"")


@settings(max_examples=40, deadline=None)
@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(["write", "truncate", "step"]), st.integers(0, 5), st.integers(0, 30), st.integers(1, 20)
        ),
        max_size=12,
    )
)
def test_any_order_of_calls(llama_engine: Engine, operations: list[tuple[str, int, int, int]]) -> None:
    """What each layer holds follows a model of three lines, and reading gives what was written."""
    engine = llama_engine
    engine.truncate(0, 0)
    held = [0] * 6
    rng = np.random.default_rng(0)
    written = np.zeros((6, 50, 128), np.float16)
    for kind, layer, first, count in operations:
        if kind == "truncate":
            engine.truncate(0, first)
            held = [min(length, first) for length in held]
        elif kind == "write":
            rows = rng.standard_normal((2, count, 64)).astype(np.float16)
            if first > held[layer]:
                with pytest.raises(StepGap):
                    engine.kv_write(0, layer, first, rows)
                continue
            engine.kv_write(0, layer, first, rows)
            written[layer, first : first + count] = np.concatenate(rows, axis=1)
            held[layer] = first + count
        elif first > min(held[: layer + 1]):
            with pytest.raises(StepGap):
                engine.step(token_rows((0, layer + 1), [1] * count, first, want=[] if layer == 5 else None))
        else:
            engine.step(token_rows((0, layer + 1), [1] * count, first, want=[] if layer == 5 else None))
            held = [first + count if i <= layer else min(length, first) for i, length in enumerate(held)]
            for i in range(layer + 1):
                written[i, first : first + count] = rows_of(engine, i, first, count)
        assert engine.position(0) == max(held)
        for i, length in enumerate(held):
            if length:
                np.testing.assert_array_equal(rows_of(engine, i, 0, length), written[i, :length])
            with pytest.raises(StepGap):
                engine.kv_read(0, i, length, 1)


def rows_of(engine: Engine, layer: int, first: int, count: int) -> np.ndarray:
    """Keys and values side by side, [count, 128]."""
    data = engine.kv_read(0, layer, first, count).view(np.float16).reshape(2, count, 64)
    return np.concatenate(data, axis=1)


@pytest.fixture(scope="module")
def llama_engine(llama_untied_path: Path) -> Iterator[Engine]:
    with Engine.open(config(llama_untied_path, tokens=50)) as engine:
        yield engine

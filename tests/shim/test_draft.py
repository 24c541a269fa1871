"""Drafts of the MTP block: they guess the trunk's tokens, and the trunk does not notice them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shim.engine import Engine
from shim.errors import BadStep, StepGap, UnsupportedError
from shim.process import EngineProcess
from shim.types import EngineConfig, Floats, Ints, StepBatch
from tests.models import GLM_TOP_K
from tests.shim.steps import config, prompt, token_rows, with_hidden

RUN = (0, 10)
MTP_LAYER = 10
LENGTH = GLM_TOP_K + 40  # beyond top-k, and beyond the rows the block lets wait


def drafting(path: Path, first: int = 0, *, slots: int = 1, tokens: int = 512, chunk_tokens: int = 512) -> EngineConfig:
    return replace(config(path, first, None, slots=slots, tokens=tokens, chunk_tokens=chunk_tokens), load_mtp=True)


def prefill(engine: Engine, tokens: Sequence[int], *, slot: int = 0, chunk: int = 512) -> Floats:
    """The last row's logits."""
    row = np.empty(0, np.float32)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        row = engine.logits_step(token_rows(RUN, part, start, slot=slot, want=[len(part) - 1], tiled=True))[0]
    return row


def decode(engine: Engine, token: int, position: int, slot: int = 0) -> Floats:
    row: Floats = engine.logits_step(token_rows(RUN, [token], position, slot=slot, want=[0]))[0]
    return row


@pytest.fixture
def engine(glm_random_ud_path: Path) -> Iterator[Engine]:
    with Engine.open(drafting(glm_random_ud_path, slots=3)) as engine:
        yield engine


def test_the_trunk_has_the_same_bits(engine: Engine, glm_random_ud_path: Path) -> None:
    """Prefill with few and all rows wanted, decode rows alone and beside another slot's, always with drafts between."""
    tokens = prompt(LENGTH + 20, engine.info.n_vocab)
    steps = [
        token_rows(RUN, tokens[:LENGTH], want=[LENGTH - 1], tiled=True),
        token_rows(RUN, tokens[:50], slot=1, want=[3, 40], tiled=True),
        token_rows(RUN, tokens[:20], slot=2, want=range(20), tiled=True),
        token_rows(RUN, tokens[LENGTH : LENGTH + 9], LENGTH, want=range(9)),
        token_rows(RUN, tokens[50:60], 50, slot=1, want=[]),
        pair(tokens[LENGTH + 9], LENGTH + 9, tokens[60], 60),
        token_rows(RUN, tokens[LENGTH + 9 : LENGTH + 20], LENGTH + 9, want=[10]),
    ]
    with Engine.open(replace(drafting(glm_random_ud_path, slots=3), load_mtp=False)) as plain:
        for step in steps:
            expected = plain.logits_step(step)
            np.testing.assert_array_equal(engine.logits_step(step), expected)
            for slot in range(3):
                before = engine.position(slot)
                engine.draft(slot, 4)
                assert engine.position(slot) == before
            if len(expected):
                np.testing.assert_array_equal(engine.row(int(step.slot[-1])), expected[-1])


def pair(token: int, position: int, other_token: int, other_position: int) -> StepBatch:
    return StepBatch(
        RUN,
        slot=np.array([0, 1], np.int32),
        position=np.array([position, other_position], np.int32),
        tokens=np.array([token, other_token], np.int32),
        want=np.ones(2, np.uint8),
    )


def drafts_along(engine: Engine, tokens: Sequence[int], slot: int = 0) -> list[Ints]:
    """Drafts after the prompt of LENGTH tokens and after each one that follows."""
    prefill(engine, tokens[:LENGTH], slot=slot)
    found = [engine.draft(slot, 3)]
    for position in range(LENGTH, len(tokens)):
        decode(engine, tokens[position], position, slot)
        found.append(engine.draft(slot, 3))
    return found


def test_two_sessions_take_turns(engine: Engine) -> None:
    first = prompt(LENGTH + 8, engine.info.n_vocab)
    second = prompt(LENGTH + 8, engine.info.n_vocab, seed=1)
    expected = [drafts_along(engine, first), drafts_along(engine, second, 1)]
    for slot in range(2):
        engine.truncate(slot, 0)
    prefill(engine, first[:LENGTH])
    prefill(engine, second[:LENGTH], slot=2)
    for step in range(8):
        np.testing.assert_array_equal(engine.draft(0, 3), expected[0][step])
        np.testing.assert_array_equal(engine.draft(2, 3), expected[1][step])
        decode(engine, first[LENGTH + step], LENGTH + step)
        decode(engine, second[LENGTH + step], LENGTH + step, 2)


def test_asking_again_gives_the_same(engine: Engine) -> None:
    prefill(engine, prompt(LENGTH, engine.info.n_vocab))
    five = engine.draft(0, 5)
    assert len(five) == 5
    np.testing.assert_array_equal(engine.draft(0, 5), five)
    np.testing.assert_array_equal(engine.draft(0, 2), five[:2])
    assert len(engine.draft(0, 0)) == 0


def test_after_a_rollback(engine: Engine) -> None:
    """As when drafts were refused: several rows at once, back to one of them, on with another token."""
    tokens = prompt(LENGTH + 6, engine.info.n_vocab)
    expected = drafts_along(engine, tokens)
    engine.truncate(0, 0)
    prefill(engine, tokens[:LENGTH])
    for position in range(LENGTH, LENGTH + 6):
        ahead = [tokens[position], *prompt(40, engine.info.n_vocab, seed=position)]
        engine.logits_step(token_rows(RUN, ahead, position, want=range(41)))
        engine.draft(0, 3)
        engine.truncate(0, position)
        assert len(engine.draft(0, 3)) == 0  # its row is gone
        decode(engine, tokens[position], position)
        np.testing.assert_array_equal(engine.draft(0, 3), expected[position - LENGTH + 1])


def test_back_to_before_what_is_kept(engine: Engine) -> None:
    tokens = prompt(400, engine.info.n_vocab)
    prefill(engine, tokens)
    engine.truncate(0, 100)
    decode(engine, tokens[100], 100)
    assert len(engine.draft(0, 3)) == 3
    rows = engine.kv_read(0, MTP_LAYER, 0, 101).view(np.float16)
    engine.truncate(0, 0)
    prefill(engine, tokens[:101])
    again = engine.kv_read(0, MTP_LAYER, 0, 101).view(np.float16)
    np.testing.assert_allclose(rows[: 100 * 320], again[: 100 * 320], atol=0.1)


@pytest.mark.parametrize("cut", [1, 2, 6])
def test_exit_span_drafts_as_the_whole_model(engine: Engine, glm_random_ud_path: Path, cut: int) -> None:
    tokens = prompt(LENGTH + 5, engine.info.n_vocab)
    expected = drafts_along(engine, tokens)
    with (
        Engine.open(config(glm_random_ud_path, 0, cut, tokens=512)) as entry,
        Engine.open(drafting(glm_random_ud_path, cut)) as exit_,
    ):
        for position, want in zip([0, *range(LENGTH, LENGTH + 5)], expected, strict=True):
            part = tokens[:LENGTH] if position == 0 else tokens[position : position + 1]
            rows = token_rows((0, cut), part, position, tiled=position == 0)
            hidden = entry.step(rows).hidden
            assert hidden is not None
            later = with_hidden(rows, (cut, 10), hidden, want=[len(part) - 1])
            exit_.logits_step(replace(later, tokens=rows.tokens))
            np.testing.assert_array_equal(exit_.draft(0, 3), want)


def test_chunks_and_single_rows_give_the_block_the_same(engine: Engine) -> None:
    tokens = prompt(LENGTH, engine.info.n_vocab)
    prefill(engine, tokens)
    prefill(engine, tokens, slot=1, chunk=33)
    prefill(engine, tokens, slot=2, chunk=1)
    whole, chunks, single = (engine.kv_read(slot, MTP_LAYER, 0, LENGTH).view(np.float16) for slot in range(3))
    np.testing.assert_allclose(chunks, whole, atol=0.1)
    np.testing.assert_allclose(single, whole, atol=0.1)


def test_a_step_without_tokens_leaves_a_hole(engine: Engine, glm_random_ud_path: Path) -> None:
    tokens = prompt(20, engine.info.n_vocab)
    prefill(engine, tokens[:10])
    expected = engine.draft(0, 3)
    with Engine.open(config(glm_random_ud_path, 0, 6)) as entry, Engine.open(drafting(glm_random_ud_path, 6)) as exit_:
        rows = [token_rows((0, 6), tokens[:10]), token_rows((0, 6), tokens[10:15], 10), token_rows((0, 6), [1], 15)]
        hidden = [entry.step(part).hidden for part in rows]
        late = [with_hidden(part, (6, 10), state, [len(state) - 1]) for part, state in zip(rows, hidden, strict=True)]  # type: ignore[arg-type]
        first, hole, last = (replace(part, tokens=row.tokens) for part, row in zip(late, rows, strict=True))
        exit_.logits_step(first)
        np.testing.assert_array_equal(exit_.draft(0, 3), expected)
        exit_.logits_step(replace(hole, tokens=None))
        assert len(exit_.draft(0, 3)) == 0
        exit_.logits_step(last)
        assert len(exit_.draft(0, 3)) == 0
        with pytest.raises(StepGap):
            exit_.kv_read(0, MTP_LAYER, 0, 11)
        exit_.logits_step(hole)
        assert len(exit_.draft(0, 3)) == 3
        assert len(exit_.kv_read(0, MTP_LAYER, 0, 15))


def test_rows_of_the_block_move_to_another_engine(engine: Engine, glm_random_ud_path: Path) -> None:
    tokens = prompt(LENGTH + 1, engine.info.n_vocab)
    prefill(engine, tokens[:LENGTH])
    with Engine.open(drafting(glm_random_ud_path)) as other:
        for layer in (MTP_LAYER, *range(10)):
            other.kv_write(0, layer, 0, engine.kv_read(0, layer, 0, LENGTH))
        np.testing.assert_array_equal(other.kv_read(0, MTP_LAYER, 0, LENGTH), engine.kv_read(0, MTP_LAYER, 0, LENGTH))
        np.testing.assert_array_equal(decode(other, tokens[-1], LENGTH), decode(engine, tokens[-1], LENGTH))
        assert len(other.draft(0, 3)) == 3
        other.truncate(0, 0)
        for layer in range(10):  # without the block's own rows there are no drafts
            other.kv_write(0, layer, 0, engine.kv_read(0, layer, 0, LENGTH))
        decode(other, tokens[-1], LENGTH)
        assert len(other.draft(0, 3)) == 0


def test_drafts_end_with_the_slot(glm_random_ud_path: Path) -> None:
    with Engine.open(drafting(glm_random_ud_path, tokens=20)) as engine:
        tokens = prompt(20, engine.info.n_vocab)
        prefill(engine, tokens[:18])
        assert len(engine.draft(0, 9)) == 2
        decode(engine, tokens[18], 18)
        decode(engine, tokens[19], 19)
        assert len(engine.draft(0, 9)) == 0


def test_no_row_no_draft(engine: Engine) -> None:
    assert len(engine.draft(0, 3)) == 0
    engine.step(token_rows(RUN, [1, 2, 3], want=[]))
    assert len(engine.draft(0, 3)) == 0
    engine.step(token_rows(RUN, [4, 5, 6], 3, want=[1]))  # not the last row
    assert len(engine.draft(0, 3)) == 3
    with pytest.raises(BadStep):
        engine.draft(3, 1)


def test_where_no_block_is_loaded(llama_untied_path: Path, glm_random_ud_path: Path) -> None:
    with Engine.open(config(glm_random_ud_path)) as plain, pytest.raises(UnsupportedError, match="no MTP block"):
        plain.draft(0, 1)
    with Engine.open(replace(config(glm_random_ud_path, 0, 6), load_mtp=True)) as entry:
        assert entry.info.n_mtp == 0
        with pytest.raises(UnsupportedError):
            entry.draft(0, 1)
        with pytest.raises(BadStep):
            entry.kv_row_bytes(MTP_LAYER)
    with pytest.raises(UnsupportedError, match="no MTP block"):
        Engine.open(replace(config(llama_untied_path), load_mtp=True))


def test_tokens_beside_hidden_states_are_checked(glm_random_ud_path: Path) -> None:
    rows = with_hidden(token_rows((0, 6), [1, 2]), (6, 10), np.zeros((2, 256), np.float32), want=[1])
    tokens = np.array([1, 1 << 20], np.int32)
    with Engine.open(drafting(glm_random_ud_path, 6)) as exit_:
        with pytest.raises(BadStep, match="vocabulary"):
            exit_.logits_step(replace(rows, tokens=tokens))
        with pytest.raises(BadStep, match="not finite"):
            exit_.logits_step(replace(rows, tokens=tokens[:1].repeat(2), hidden=np.full((2, 256), np.inf, np.float32)))
    with Engine.open(config(glm_random_ud_path, 6, None)) as plain, pytest.raises(BadStep, match="takes hidden states"):
        plain.logits_step(replace(rows, tokens=tokens[:1].repeat(2)))


def test_memory_counts_the_block(glm_random_ud_path: Path) -> None:
    loaded = drafting(glm_random_ud_path, slots=2)
    with Engine.open(loaded) as engine, Engine.open(replace(loaded, load_mtp=False)) as plain:
        assert engine.info.kv_bytes - plain.info.kv_bytes == 2 * 512 * 320 * 2
        assert engine.info.compute_bytes > plain.info.compute_bytes
        prefill(engine, prompt(500, engine.info.n_vocab))
        kept = engine.info.output_bytes
        assert kept - plain.info.output_bytes < (512 + 160) * 256 * 4 + 3 * 2 * engine.info.n_vocab * 4 + 4096


async def test_the_worker_process_drafts_alike(engine: Engine, glm_random_ud_path: Path) -> None:
    tokens = prompt(LENGTH, engine.info.n_vocab)
    prefill(engine, tokens)
    async with await EngineProcess.start(drafting(glm_random_ud_path)) as process:
        assert process.info.n_mtp == 1
        await process.step(token_rows(RUN, tokens, want=[LENGTH - 1], tiled=True))
        np.testing.assert_array_equal(await process.draft(0, 4), engine.draft(0, 4))

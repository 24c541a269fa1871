"""What a step may not contain, and that nothing changes when it does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from shim.engine import Engine
from shim.errors import BadStep, ComputeError, EngineError, SlotFull, StepGap
from shim.types import ContextSpec, EngineConfig, StepBatch, SummarySpec
from tests.shim.steps import config, token_rows, with_hidden

HELD = 6
TOKENS = [5, 6, 7]


@pytest.fixture(scope="module")
def entry(llama_untied_path: Path) -> Iterator[Engine]:
    """Layers 0-4 of 6; slots 0-2 of 40 tokens, slot 3 of 300."""
    contexts = (ContextSpec(3, 40), ContextSpec(1, 300))
    with Engine.open(EngineConfig(llama_untied_path, 0, 4, contexts=contexts, chunk_tokens=16)) as engine:
        yield engine


@pytest.fixture(scope="module")
def tail(llama_untied_path: Path) -> Iterator[Engine]:
    with Engine.open(replace(config(llama_untied_path, 4, None, slots=3), chunk_tokens=16)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _filled(entry: Engine, tail: Engine) -> None:
    for slot in range(3):
        for engine in (entry, tail):
            engine.truncate(slot, 0)
    hidden = entry.step(token_rows((0, 4), [1, 2, 3, 4, 5, 6])).hidden
    assert hidden is not None
    tail.step(with_hidden(token_rows((0, 4), [0] * HELD), (4, 6), hidden, want=[5]))


def rows(**changes: object) -> StepBatch:
    return replace(token_rows((0, 4), TOKENS, HELD), **changes)  # type: ignore[arg-type]


def hidden_rows(**changes: object) -> StepBatch:
    batch = token_rows((0, 4), TOKENS, HELD)
    return replace(with_hidden(batch, (4, 6), np.zeros((3, 128), np.float32), want=[2]), **changes)  # type: ignore[arg-type]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


BAD_ENTRY_STEPS: dict[str, tuple[type[EngineError], Callable[[], StepBatch]]] = {
    "no rows": (BadStep, lambda: token_rows((0, 4), [], HELD)),
    "more rows than a chunk": (BadStep, lambda: token_rows((0, 4), [1] * 17, 0)),
    "range before the span": (BadStep, lambda: rows(run=(-1, 4))),
    "range beyond the span": (BadStep, lambda: rows(run=(0, 5))),
    "empty range": (BadStep, lambda: rows(run=(2, 2))),
    "backward range": (BadStep, lambda: rows(run=(3, 1))),
    "huge range": (BadStep, lambda: rows(run=(0, 2**31 - 1))),
    "no such slot": (BadStep, lambda: rows(slot=ints(4, 4, 4))),
    "negative slot": (BadStep, lambda: rows(slot=ints(-1, -1, -1))),
    "slots of two contexts": (BadStep, lambda: rows(slot=ints(1, 2, 3), position=ints(0, 0, 0))),
    "slot comes twice": (BadStep, lambda: rows(slot=ints(0, 1, 0), position=ints(6, 0, 7))),
    "negative position": (BadStep, lambda: rows(position=ints(-1, 0, 1))),
    "position skips": (BadStep, lambda: rows(position=ints(6, 8, 9))),
    "position repeats": (BadStep, lambda: rows(position=ints(6, 6, 7))),
    "position falls": (BadStep, lambda: rows(position=ints(6, 5, 4))),
    "token beyond the vocabulary": (BadStep, lambda: rows(tokens=ints(5, 1 << 20, 7))),
    "negative token": (BadStep, lambda: rows(tokens=ints(5, -1, 7))),
    "hidden states at the entry": (BadStep, lambda: rows(tokens=None, hidden=np.zeros((3, 128), np.float32))),
    "both": (BadStep, lambda: rows(hidden=np.zeros((3, 128), np.float32))),
    "neither": (BadStep, lambda: rows(tokens=None)),
    "wanted rows before the exit": (BadStep, lambda: rows(want=np.ones(3, np.uint8))),
    "tokens of another length": (BadStep, lambda: rows(tokens=ints(1, 2))),
    "positions of another length": (BadStep, lambda: rows(position=ints(6, 7, 8, 9))),
    "tokens of another type": (BadStep, lambda: rows(tokens=np.array(TOKENS, np.int64))),
    "gap": (StepGap, lambda: rows(position=ints(7, 8, 9))),
    "gap in an empty slot": (StepGap, lambda: rows(slot=ints(0, 1, 2), position=ints(6, 0, 1))),
    "beyond the slot": (SlotFull, lambda: rows(position=ints(40, 41, 42))),
    "far beyond the slot": (SlotFull, lambda: rows(position=ints(2**31 - 3, 2**31 - 2, 2**31 - 1))),
}

BAD_TAIL_STEPS: dict[str, Callable[[], StepBatch]] = {
    "tokens in the middle": lambda: hidden_rows(hidden=None, tokens=ints(*TOKENS)),
    "hidden states of another width": lambda: hidden_rows(hidden=np.zeros((3, 127), np.float32)),
    "hidden states of another type": lambda: hidden_rows(hidden=np.zeros((3, 128), np.float64)),
    "NaN": lambda: hidden_rows(hidden=np.full((3, 128), np.nan, np.float32)),
    "infinity": lambda: hidden_rows(hidden=np.pad(np.full((1, 1), -np.inf, np.float32), ((2, 0), (0, 127)))),
    "no wanted rows named": lambda: hidden_rows(want=None),
    "wanted rows of another length": lambda: hidden_rows(want=np.ones(2, np.uint8)),
    "before its span": lambda: hidden_rows(run=(3, 6)),
}


@pytest.mark.parametrize("name", BAD_ENTRY_STEPS)
def test_bad_entry_step_changes_nothing(entry: Engine, name: str) -> None:
    kind, make = BAD_ENTRY_STEPS[name]
    good = rows()
    expected = entry.step(good).hidden
    entry.truncate(0, HELD)
    with pytest.raises(kind) as raised:
        entry.step(make())
    assert type(raised.value) is kind
    assert [entry.position(slot) for slot in range(4)] == [HELD, 0, 0, 0]
    np.testing.assert_array_equal(entry.step(good).hidden, expected)


@pytest.mark.parametrize("name", BAD_TAIL_STEPS)
def test_bad_tail_step_changes_nothing(tail: Engine, name: str) -> None:
    row = tail.row(0)
    with pytest.raises(BadStep):
        tail.step(BAD_TAIL_STEPS[name]())
    assert tail.position(0) == HELD
    np.testing.assert_array_equal(tail.row(0), row)


@pytest.mark.parametrize(
    "specs", [[SummarySpec(), SummarySpec()], [SummarySpec(top=1 << 20)], [SummarySpec(ids=(1 << 20,))]]
)
def test_bad_summaries(tail: Engine, specs: list[SummarySpec]) -> None:
    with pytest.raises(BadStep):
        tail.step(hidden_rows(), specs)
    assert tail.position(0) == HELD


def test_error_names_what_was_wrong(entry: Engine) -> None:
    with pytest.raises(StepGap, match="slot 0 holds 6 tokens, the step starts at 7"):
        entry.step(rows(position=ints(7, 8, 9)))


@pytest.mark.parametrize(("tensor", "last"), [("output_norm.weight", 6), ("blk.2.ffn_norm.weight", 4)])
def test_a_result_that_is_not_finite_empties_the_slot(
    tmp_path: Path, llama_untied_path: Path, tensor: str, last: int
) -> None:
    path = tmp_path / "broken.gguf"
    shutil.copy(llama_untied_path, path)
    [offset] = [each.data_offset for each in gguf.GGUFReader(path).tensors if each.name == tensor]
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(np.float32(np.nan).tobytes())
    with Engine.open(config(path, 0, last)) as engine:
        for layer in range(last):
            engine.kv_write(0, layer, 0, bytes(2 * engine.kv_row_bytes(layer).total))
        with pytest.raises(ComputeError, match="finite"):
            engine.step(token_rows((0, last), [3], 2, want=[0] if last == 6 else None))
        assert engine.position(0) == 0
        engine.step(token_rows((0, 1), [1]))


def test_illegal_run_range_of_glm(glm_random_f32_path: Path) -> None:
    """Layer 3 reuses the choice of layer 2, so a run may not start there."""
    with Engine.open(config(glm_random_f32_path)) as engine:
        batch = token_rows((0, 10), [1, 2, 3])
        wrong = StepBatch(
            (3, 10), batch.slot, batch.position, hidden=np.zeros((3, 256), np.float32), want=np.ones(3, np.uint8)
        )
        with pytest.raises(BadStep, match="layers 3 to 10"):
            engine.step(wrong)
        assert engine.position(0) == 0

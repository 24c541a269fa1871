"""The longest slot that is computed correctly, and the refusal of a longer one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shim.engine import Engine
from shim.errors import SlotFull, UnsupportedError
from shim.types import MAX_SLOT_TOKENS, ContextSpec, EngineConfig, Floats, KvType
from tests.shim.steps import config, prompt, token_rows

LEFT = 2  # tokens that are decoded behind the noise


def fill_with_noise(engine: Engine, layer: int, count: int) -> Floats:
    """Puts normal noise into the first ``count`` positions of one layer."""
    widths = engine.kv_row_bytes(layer)
    rng = np.random.default_rng(layer)
    block = rng.standard_normal(4096 * widths.total // 2, np.float32).astype(np.float16)
    rows = np.resize(block, count * widths.total // 2)
    engine.kv_write(0, layer, 0, rows)
    return rows.astype(np.float32)


@pytest.mark.parametrize(("fixture", "last"), [("llama_untied_path", 2), ("glm_random_ud_path", 1)])
def test_the_longest_slot_is_computed_to_its_end(fixture: str, last: int, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(fixture)
    with Engine.open(config(path, 0, last, tokens=MAX_SLOT_TOKENS, chunk_tokens=4)) as engine:
        for layer in range(last):
            fill_with_noise(engine, layer, MAX_SLOT_TOKENS - LEFT)
        for position in range(MAX_SLOT_TOKENS - LEFT, MAX_SLOT_TOKENS):
            hidden = engine.step(token_rows((0, last), [5], position)).hidden
            assert hidden is not None
            assert np.isfinite(hidden).all()
        with pytest.raises(SlotFull):
            engine.step(token_rows((0, last), [5], MAX_SLOT_TOKENS))


def test_attention_reaches_the_whole_slot(llama_untied_path: Path) -> None:
    """One position far back stands out: the row at the end finds it."""
    count = MAX_SLOT_TOKENS - 1
    with Engine.open(config(llama_untied_path, 0, 1, tokens=MAX_SLOT_TOKENS, chunk_tokens=4)) as engine:
        rows = np.zeros((2, count, 64), np.float16)
        engine.kv_write(0, 0, 0, rows)
        quiet = engine.step(token_rows((0, 1), [5], count)).hidden
        for place in (0, 70_000, count - 1):
            engine.truncate(0, 0)
            rows[1] = 0
            rows[1, place] = 1000
            engine.kv_write(0, 0, 0, rows)
            loud = engine.step(token_rows((0, 1), [5], count)).hidden
            assert quiet is not None
            assert loud is not None
            assert np.abs(loud - quiet).max() > 1e-4


@pytest.mark.parametrize("tokens", [MAX_SLOT_TOKENS + 1, 200_000, 1 << 30, 2**31 - 1])
def test_a_longer_slot_is_refused(llama_untied_path: Path, tokens: int) -> None:
    contexts = (ContextSpec(1, 256), ContextSpec(1, tokens))
    with pytest.raises(UnsupportedError, match=r"at most 131072 tokens.*NaN"):
        Engine.open(EngineConfig(llama_untied_path, contexts=contexts))


@pytest.mark.parametrize("kv_type", KvType)
def test_element_types_of_the_cache(glm_random_f32_path: Path, kv_type: KvType) -> None:
    """The logits of a narrower type stay near those of F32, beyond top-k as well."""
    tokens = prompt(150, 200)
    rows = []
    for kind in (KvType.F32, kv_type):
        with Engine.open(EngineConfig(glm_random_f32_path, contexts=(ContextSpec(1, 256),), kv_type=kind)) as engine:
            rows.append(engine.logits_step(token_rows((0, 10), tokens, want=range(150))))
    wide, narrow = rows
    correlation = np.corrcoef(wide.ravel(), narrow.ravel())[0, 1]
    assert correlation > {KvType.F32: 0.999999, KvType.F16: 0.99, KvType.Q8_0: 0.9}[kv_type]

"""The swarm against Transformers: the same f32 weights, f32 KV, every logit within 1e-3 at every position.

Transformers runs the prompt in one pass with eager attention and its own indexer; the chain prefills it in chunks, and
once more token by token. Prompts are more than four times as long as top-k, see ``baseline`` for how they are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench import glm_transformers
from bench.gguf_weights import Array
from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, KvType
from swarm.artifact import load_manifest
from swarm.local_swarm import local_swarm
from tests import models
from tests.e2e.chains import Script, chain_logits, open_chain, spans_of
from tests.shim import steps
from tests.transformers.baseline import OWN_TOLERANCE, TIMES_TOP_K, TOLERANCE, Baseline

CHUNK_TOKENS = 64
CELLS = 512

pytestmark = pytest.mark.timeout(900)  # seconds when nothing else runs; many times that beside a training run


@pytest.fixture(params=["tiny", "noise"])
def expected(request: pytest.FixtureRequest) -> Baseline:
    baseline: Baseline = request.getfixturevalue(request.param)
    return baseline


def test_prompt_tells_right_from_wrong(expected: Baseline) -> None:
    """The indexer drops most keys and the logits say so; rounding alone changes them by far less than is tolerated."""
    assert len(expected.tokens) > TIMES_TOP_K * expected.top_k
    assert expected.own_difference < OWN_TOLERANCE
    moved = np.abs(expected.logits - expected.dense).max(axis=1)
    assert moved[: expected.top_k].max() < TOLERANCE  # up to there everything is selected
    assert np.median(moved[2 * expected.top_k :]) > 20 * TOLERANCE


@pytest.mark.parametrize("cuts", [(1, 2, 6), (2, 6)], ids=str)
async def test_chain_of_nodes_agrees(tiny: Baseline, tmp_path: Path, cuts: tuple[int, ...]) -> None:
    spans = _spans(tiny.model, cuts)
    options = ["--slots", f"1x{CELLS}", "--chunk-tokens", str(CHUNK_TOKENS), "--kv-type", "f32"]
    with local_swarm(tiny.model, spans, tmp_path, options) as swarm:
        async with open_chain(swarm.address, len(tiny.tokens) + 1) as session:
            assert spans_of(session) == spans
            for script in _scripts(tiny.tokens):
                rows = await chain_logits(session, script)
                ends = [request.start + len(request.tokens) - 1 for request in script.requests]
                assert _difference(np.stack(rows), tiny.rows(ends)) < TOLERANCE


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (6,)], ids=str)
def test_trained_spans_agree_in_every_row(tiny: Baseline, cuts: tuple[int, ...]) -> None:
    _check_every_row(tiny, cuts)


def test_random_spans_agree_in_every_row(noise: Baseline) -> None:
    _check_every_row(noise, (1, 2, 6))


def test_epsilons_are_the_engines(tmp_path: Path) -> None:
    """With small inputs to the inner norms, an epsilon of 1e-6 where the engine has none moves logits by 3."""
    path = models.write_glm(tmp_path / "quiet.gguf")
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.endswith(("attn_q_a.weight", "attn_kv_a_mqa.weight", "indexer.attn_k.weight")):
            tensor.data[:] *= 1e-3
    model = glm_transformers.load(glm_transformers.write_checkpoint(path, tmp_path / "checkpoint"))
    tokens = np.random.default_rng(0).integers(0, 256, TIMES_TOP_K * models.GLM_TOP_K).tolist()
    with Engine.open(_config(path, 0, 10)) as engine:
        ours = _all_rows([engine], tokens, CHUNK_TOKENS)
    assert _difference(ours, glm_transformers.logits(model, tokens)) < TOLERANCE
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.k_norm.eps = 1e-6
    assert _difference(ours, glm_transformers.logits(model, tokens)) > 100 * TOLERANCE


def _check_every_row(expected: Baseline, cuts: Sequence[int]) -> None:
    with ExitStack() as stack:
        configs = [_config(expected.model, *span) for span in _spans(expected.model, cuts)]
        engines = [stack.enter_context(Engine.open(config)) for config in configs]
        for size in (CHUNK_TOKENS, 1):
            assert _difference(_all_rows(engines, expected.tokens, size), expected.logits) < TOLERANCE


def _scripts(tokens: tuple[int, ...]) -> list[Script]:
    """Prefill in large chunks and in small ones of an odd size, each giving its last row, then one by one."""
    return [Script(tokens, (), CHUNK_TOKENS), Script(tokens, (), 7), Script((), tokens, CHUNK_TOKENS)]


def _spans(model: Path, cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *cuts, load_manifest(model).n_layers]))


def _config(model: Path, first: int, last: int) -> EngineConfig:
    return EngineConfig(
        model, first, last, contexts=(ContextSpec(1, CELLS),), chunk_tokens=CHUNK_TOKENS, kv_type=KvType.F32
    )


def _all_rows(engines: Sequence[Engine], tokens: Sequence[int], size: int) -> Array:
    for engine in engines:
        engine.truncate(0, 0)
    rows = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        batch = steps.token_rows((0, 0), part, start, tiled=size > 1)
        rows.append(steps.chain_logits(engines, batch, range(len(part))))
    return np.concatenate(rows)


def _difference(ours: Array, theirs: Array) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max())

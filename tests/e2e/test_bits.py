"""Over real nodes and sockets a chain gives the bits of the unsplit model, wherever it is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shim.types import KvType
from swarm.local_swarm import local_swarm
from tests.e2e.chains import Script, chain_logits, differing, open_chain, spans_of, unsplit_logits
from tests.reference import NumpyLlama

GLM_SCRIPT = Script.random(n_vocab=260, n_prompt=200, n_decoded=6, chunk_tokens=64)  # top-k is 64
LLAMA_SCRIPT = Script.random(n_vocab=260, n_prompt=70, n_decoded=6, chunk_tokens=32)

CASES = [
    pytest.param("smollm2_path", [(0, 30)], LLAMA_SCRIPT, id="smollm2-one-hop"),
    pytest.param("smollm2_path", [(0, 1), (1, 30)], LLAMA_SCRIPT, id="smollm2-uneven"),
    pytest.param("smollm2_path", [(0, 7), (7, 8), (8, 30)], LLAMA_SCRIPT, id="smollm2-single-layer-span"),
    pytest.param("smollm2_untied_path", [(0, 11), (11, 30)], LLAMA_SCRIPT, id="smollm2-untied"),
    pytest.param("llama_untied_path", [(0, 2), (2, 4), (4, 6)], LLAMA_SCRIPT, id="llama-rope-factors"),
    pytest.param("glm_random_f32_path", [(0, 1), (1, 2), (2, 6), (6, 10)], GLM_SCRIPT, id="glm-f32-every-cut"),
    pytest.param("glm_random_ud_path", [(0, 2), (2, 10)], GLM_SCRIPT, id="glm-ud-at-2"),
    pytest.param("glm_random_ud_path", [(0, 1), (1, 6), (6, 10)], GLM_SCRIPT, id="glm-ud-at-1-and-6"),
]


@pytest.mark.parametrize(("model", "spans", "script"), CASES)
async def test_chain_equals_unsplit(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, spans: list[tuple[int, int]], script: Script
) -> None:
    path: Path = request.getfixturevalue(model)
    options = ["--slots", "1x1024", "--chunk-tokens", str(script.chunk_tokens)]
    with local_swarm(path, spans, tmp_path, options) as swarm:
        async with open_chain(swarm.address, 512) as session:
            assert spans_of(session) == spans
            rows = await chain_logits(session, script)
    expected = unsplit_logits(path, script)
    assert differing(rows, expected) == []
    assert len({row.tobytes() for row in expected}) == len(script.requests)  # each step says something else


async def test_overlapping_spans_make_a_chain(smollm2_path: Path, tmp_path: Path) -> None:
    options = ["--slots", "1x1024", "--chunk-tokens", "32"]
    with local_swarm(smollm2_path, [(0, 18), (10, 30)], tmp_path, options) as swarm:
        async with open_chain(swarm.address, 512) as session:
            (first, cut), (start, last) = spans_of(session)
            assert (first, last) == (0, 30)
            assert 10 <= cut == start <= 18
            rows = await chain_logits(session, LLAMA_SCRIPT)
    assert differing(rows, unsplit_logits(smollm2_path, LLAMA_SCRIPT)) == []


async def test_independent_numpy_model_agrees(smollm2_path: Path, tmp_path: Path) -> None:
    """The engine rounds activations to 8 bits for its Q4_1 kernels, numpy computes in f32: hence the tolerance."""
    script = Script((504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 7280, 314), (), 32)
    with local_swarm(smollm2_path, [(0, 10), (10, 30)], tmp_path, ["--slots", "1x1024"]) as swarm:
        async with open_chain(swarm.address, 64) as session:
            row = (await chain_logits(session, script))[0]
    expected = NumpyLlama(smollm2_path).logits(list(script.prompt))[-1]
    assert row.argmax() == expected.argmax()
    assert np.corrcoef(row, expected)[0, 1] > 0.999
    assert np.abs(row - expected).max() < 1.0


async def test_independent_numpy_model_agrees_in_f32(llama_untied_path: Path, tmp_path: Path) -> None:
    script = Script.random(260, 40, 0, 64)
    options = ["--slots", "1x1024", "--kv-type", "f32"]
    with local_swarm(llama_untied_path, [(0, 1), (1, 6)], tmp_path, options) as swarm:
        async with open_chain(swarm.address, 64) as session:
            row = (await chain_logits(session, script))[0]
    assert np.abs(row - NumpyLlama(llama_untied_path).logits(list(script.prompt))[-1]).max() < 1e-3
    assert differing([row], unsplit_logits(llama_untied_path, script, kv_type=KvType.F32)) == []

"""The bench slice: real layers, its own name, cuts everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.glm_slice import main, plan, slice_name, slice_shape, toy_shape, write_slice
from bench.router import Router, embedded_tokens
from bench.span_bytes import layer_bytes
from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, Floats, StepBatch
from swarm.artifact import Manifest, load_manifest
from swarm.artifact.catalog import GLM52

CLASS_A_BYTES = 2_668_793_856


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_slice(tmp_path_factory.mktemp("slice"), f"{slice_name(4)}-toy", toy_shape(4))


@pytest.fixture(scope="module")
def manifest(toy: Path) -> Manifest:
    return load_manifest(toy)


def test_layers_are_the_artifacts() -> None:
    ours = {
        t.name.removeprefix("blk.2."): (t.type, t.dims) for t in plan("x", slice_shape()).tensors if "blk.2." in t.name
    }
    theirs = {
        t.name.removeprefix("blk.10."): (t.type, t.dims) for t in GLM52.manifest.tensors if t.name.startswith("blk.10.")
    }
    assert ours == theirs
    assert sum(t.bytes for t in plan("x", slice_shape()).tensors if "blk." in t.name) == 4 * CLASS_A_BYTES


def test_it_says_what_it_is_and_may_be_cut_anywhere(toy: Path, manifest: Manifest) -> None:
    assert manifest.name == "glm-5.2-bench-slice-4a-toy"
    assert manifest.cuts == (0, 1, 2, 3, 4)
    assert b"noise, not the model" in toy.read_bytes()[:4096]


def test_bytes_of_a_step() -> None:
    layer = layer_bytes(GLM52.manifest, 10)
    assert layer.always + 256 * layer.per_expert == CLASS_A_BYTES
    assert layer.kv_per_token == 1152 + 256
    assert layer.most_experts(1) == layer.expected_experts(1) == 8
    assert layer.most_experts(100) == 256
    assert layer.step(2, 100, 16) == layer.always + 16 * layer.per_expert + 2 * 100 * 1408
    shared = layer_bytes(GLM52.manifest, 11)
    assert shared.kv_per_token == 1152
    assert shared.always < layer.always  # its indexer is never read


def test_the_experts_counted_are_those_the_engine_runs(toy: Path) -> None:
    """With the gates and experts of the router's choice, numpy gets the layer's output; with others it does not."""
    router, n = Router(toy, 1), 8
    slot, position = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
    with Engine.open(EngineConfig(toy, contexts=(ContextSpec(n, 256),))) as engine:
        tokens = np.arange(n, dtype=np.int32) * 7
        entering = engine.step(StepBatch((0, 1), slot, position, tokens)).hidden
        assert entering is not None
        leaving = engine.step(StepBatch((1, 2), slot, position, hidden=entering)).hidden
    assert leaving is not None
    choices = router.choices(entering)
    assert len(np.unique(choices)) > 8  # of 32, four a row
    added = np.abs(leaving - entering - router.attention(entering)).mean()
    assert np.abs(layer_output(router, entering, choices) - leaving).mean() < 0.05 * added
    assert np.abs(layer_output(router, entering, (choices + 1) % 32) - leaving).mean() > 0.3 * added


def layer_output(router: Router, entering: Floats, choices: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Floats:
    x, scores = router.feed_forward_input(entering), router.scores(entering)
    experts = [router.matrix(f"ffn_{kind}_exps.weight") for kind in ("gate", "up", "down")]
    shared = [router.matrix(f"ffn_{kind}_shexp.weight") for kind in ("gate", "up", "down")]
    out = entering + router.attention(entering)
    for row, chosen in enumerate(choices):
        weights = scores[row, chosen] / scores[row, chosen].sum() * 2.5
        out[row] += gated(x[row], *shared)
        for weight, expert in zip(weights, chosen, strict=True):
            out[row] += weight * gated(x[row], *(matrix[expert] for matrix in experts))
    return out


def gated(x: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    a = gate @ x
    result: Floats = down @ (a / (1 + np.exp(-a)) * (up @ x))
    return result


def test_embedding_rows(toy: Path) -> None:
    rows = embedded_tokens(toy, [5, 9, 5])
    assert rows.shape == (3, 256)
    np.testing.assert_array_equal(rows[0], rows[2])
    assert 0.5 < float(rows.std()) < 2


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--toy", "--layers", "2"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name == "glm-5.2-bench-slice-2a-toy.gguf"
    assert load_manifest(path).n_layers == 2
    assert main([str(tmp_path), "--toy", "--layers", "2"]) == 2
    assert "already there" in capsys.readouterr().err
    assert main([str(tmp_path), "--layers", "0"]) == 2

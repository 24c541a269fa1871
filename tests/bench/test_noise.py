"""Noise must be what a file can hold: finite, of the wanted spread, and the same again for the same seed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bench.noise import TYPES, Noise, dequantised, distribution
from swarm.artifact import ggml_types
from swarm.errors import UsageError

DIMS = (6144, 8, 4)


def weights(noise: Noise, name: str, kind: str, dims: tuple[int, ...] = DIMS) -> np.ndarray[tuple[int, ...], np.dtype]:
    data = np.frombuffer(b"".join(noise.tensor(name, kind, dims)), np.uint8)
    assert data.nbytes == ggml_types.tensor_bytes(kind, dims)
    if kind == "F32":
        return data.view(np.float32)
    return dequantised(data.reshape(-1, ggml_types.row_bytes(kind, 1)), kind)


@pytest.mark.parametrize("kind", TYPES)
def test_weights_keep_the_size_of_what_goes_through(kind: str) -> None:
    values = weights(Noise(3, pool_bytes=1 << 18), "blk.3.ffn_up.weight", kind)
    assert np.isfinite(values).all()
    assert float(values.std()) == pytest.approx(6144**-0.5, rel=0.05)
    assert abs(float(values.mean())) < 0.05 * 6144**-0.5  # a mean would grow from layer to layer


def test_same_seed_same_noise() -> None:
    def data(seed: int, name: str) -> bytes:
        return b"".join(Noise(seed, pool_bytes=1 << 18).tensor(name, "IQ1_S", DIMS))

    assert data(1, "a.weight") == data(1, "a.weight")
    assert data(1, "a.weight") != data(1, "b.weight")
    assert data(1, "a.weight") != data(2, "a.weight")


def test_norms_are_near_one_and_gates_differ_little() -> None:
    norm = weights(Noise(), "blk.3.attn_norm.weight", "F32", (6144,))
    assert float(norm.mean()) == pytest.approx(1, abs=0.05)
    bias = weights(Noise(), "blk.3.exp_probs_b.bias", "F32", (256,))
    assert float(np.abs(bias).max()) < 0.2
    assert distribution("token_embd.weight", (6144, 100)) == (0.0, 1.0)


def test_another_type_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no noise of type IQ2_S; choose"):
        list(Noise().tensor("a.weight", "IQ2_S", DIMS))


def test_faster_than_a_disk() -> None:
    noise, dims = Noise(), (2048, 6144, 64)
    list(noise.tensor("blk.3.ffn_down_exps.weight", "IQ3_XXS", (2048, 8)))  # makes the blocks
    began = time.process_time()
    made = sum(len(piece) for piece in noise.tensor("blk.3.ffn_down_exps.weight", "IQ3_XXS", dims))
    assert made / (time.process_time() - began) > 300e6

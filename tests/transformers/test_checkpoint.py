"""The way from a GGUF to a Transformers checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from bench import glm_transformers
from bench.gguf_weights import GgufWeights, write_f32
from tests import models


def test_f32_copy_has_the_same_metadata_and_the_dequantised_values(glm_random_ud_path: Path, tmp_path: Path) -> None:
    copy = GgufWeights(write_f32(glm_random_ud_path, tmp_path / "f32.gguf"))
    source = GgufWeights(glm_random_ud_path)
    assert {key: value for key, value, _, _ in copy.pairs()} == {
        **{key: value for key, value, _, _ in source.pairs()},
        "general.file_type": int(gguf.LlamaFileType.ALL_F32),
    }
    assert copy.names == source.names
    for stored in gguf.GGUFReader(copy.path).tensors:
        assert stored.tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(stored.data, source.tensor(stored.name), err_msg=stored.name)


def test_key_and_value_halves_are_joined_head_by_head(tmp_path: Path) -> None:
    source = models.write_glm(tmp_path / "glm.gguf", n_head=3)
    tensors = load_file(glm_transformers.write_checkpoint(source, tmp_path / "checkpoint") / glm_transformers.TENSORS)
    weights = GgufWeights(source)
    joined = tensors["model.layers.4.self_attn.kv_b_proj.weight"].reshape(3, 128, 256)
    for head in range(3):
        np.testing.assert_array_equal(joined[head, :64], weights.tensor("blk.4.attn_k_b.weight")[head].T)
        np.testing.assert_array_equal(joined[head, 64:], weights.tensor("blk.4.attn_v_b.weight")[head])


def test_only_full_layers_have_indexers(glm_random_f32_path: Path, tmp_path: Path) -> None:
    folder = glm_transformers.write_checkpoint(glm_random_f32_path, tmp_path)
    config = json.loads((folder / glm_transformers.CONFIG).read_text())
    assert config["indexer_types"] == ["full" if full else "shared" for full in models.GLM_FULL_LAYERS]
    held = {name.split(".")[2] for name in load_file(folder / glm_transformers.TENSORS) if ".indexer." in name}
    assert held == {"0", "1", "2", "6"}


def test_tensor_without_a_place_is_refused(glm_random_f32_path: Path, tmp_path: Path) -> None:
    source = GgufWeights(glm_random_f32_path)
    writer = gguf.GGUFWriter(tmp_path / "more.gguf", "glm-dsa")
    for key, value, kind, element_kind in source.pairs():
        writer.add_key_value(key, value, kind, element_kind)
    for name in source.names:
        writer.add_tensor(name, source.tensor(name))
    writer.add_tensor("blk.3.attn_q.bias", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"no place for blk\.3\.attn_q\.bias"):
        glm_transformers.write_checkpoint(tmp_path / "more.gguf", tmp_path / "checkpoint")


def test_checkpoint_that_lacks_a_tensor_is_refused(glm_random_f32_path: Path, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = glm_transformers.write_checkpoint(glm_random_f32_path, tmp_path)
    tensors = load_file(folder / glm_transformers.TENSORS)
    del tensors["model.layers.7.mlp.gate.e_score_correction_bias"]
    save_file(tensors, folder / glm_transformers.TENSORS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="e_score_correction_bias"):
        glm_transformers.load(folder)

"""The pinned manifest of GLM-5.2 UD-IQ1_S against what is published of it, and against files of its layout."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from shim.types import ContextSpec
from swarm.artifact import description
from swarm.artifact.catalog import GLM52, LocalModel, find_model, open_model
from swarm.artifact.gguf_file import read_header
from swarm.artifact.local_copy import check_copy
from swarm.artifact.manifest import Manifest, layer_of, load_manifest
from swarm.artifact.memory import estimate
from swarm.errors import ArtifactMismatch
from tests.artifact import glm52

GIB = 1 << 30
CLASS_A = 2_668_793_856
CLASS_B = 3_071_447_040
LAST = 3_549_597_696
IN_CLASS_B = {6, 9, 29, *range(39, 49), 68, 70, 72, 73, 74}


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return GLM52.manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest) -> Path:
    folder = tmp_path_factory.mktemp("glm52")
    glm52.write(folder, manifest)
    return folder


def with_metadata_of(folder: Path, manifest: Manifest) -> Manifest:
    """The pinned manifest with the digests of the first file in ``folder``, whose metadata nobody published."""
    first = manifest.files[0]
    digest = sha256((folder / first.name).read_bytes()).hexdigest()
    return replace(manifest, header_sha256=digest, files=(replace(first, sha256=digest), *manifest.files[1:]))


# --- what is published


def test_files(manifest: Manifest) -> None:
    assert manifest.artifact_id == GLM52.artifact_id
    assert [file.name for file in manifest.files[::5]] == [
        "GLM-5.2-UD-IQ1_S-00001-of-00006.gguf",
        "GLM-5.2-UD-IQ1_S-00006-of-00006.gguf",
    ]
    assert manifest.size_bytes == 216_715_360_960
    assert manifest.header_sha256 == manifest.files[0].sha256
    assert Counter(tensor.file for tensor in manifest.tensors) == {1: 458, 2: 416, 3: 391, 4: 414, 5: 130}


def test_every_file_is_full_to_its_last_byte(manifest: Manifest) -> None:
    ends = {index: file.header_bytes for index, file in enumerate(manifest.files)}
    for tensor in manifest.tensors:
        assert tensor.offset == ends[tensor.file], tensor.name
        ends[tensor.file] = -(-(tensor.offset + tensor.bytes) // 32) * 32
    assert ends == {index: file.size_bytes for index, file in enumerate(manifest.files)}


def test_bytes_of_each_layer(manifest: Manifest) -> None:
    special = {**dict.fromkeys(range(3), 309_201_920), **dict.fromkeys((75, 76, 77), LAST), 8: 3_571_027_968}
    special[78] = 3_755_716_608
    expected = [special.get(layer, CLASS_B if layer in IN_CLASS_B else CLASS_A) for layer in range(79)]
    assert expected.count(CLASS_A) == 53
    found = description.layers(manifest)
    assert [layer.kind.file_bytes for layer in found] == expected
    ends = {tensor.name: tensor.bytes for tensor in description.outside_layers(manifest)}
    assert ends == {"token_embd.weight": 535_265_280, "output.weight": 535_265_280, "output_norm.weight": 24_576}
    trunk = sum(tensor.bytes for tensor in manifest.tensors if layer_of(tensor.name) != 78)
    assert round(trunk / GIB, 2) == 198.33


def test_element_types(manifest: Manifest) -> None:
    types = {tensor.name: tensor.type for tensor in manifest.tensors}
    gates = {layer: types[f"blk.{layer}.ffn_gate_exps.weight"] for layer in range(3, 79)}
    assert {layer for layer, kind in gates.items() if kind == "IQ2_XXS"} == IN_CLASS_B | {8, 75, 76, 77}
    assert gates[78] == "Q2_K"
    assert types["blk.78.ffn_down_exps.weight"] == "Q3_K"
    downs = {layer for layer in range(3, 78) if types[f"blk.{layer}.ffn_down_exps.weight"] == "IQ4_XS"}
    assert downs == {8, 75, 76, 77}
    assert {types[f"blk.{layer}.attn_k_b.weight"] for layer in range(79)} == {"Q8_0"}
    assert (types["token_embd.weight"], types["output.weight"], manifest.is_tied) == ("Q4_K", "Q4_K", False)


def test_cuts_indexers_and_files_of_a_layer(manifest: Manifest) -> None:
    assert manifest.cuts == (0, 1, 2, *range(6, 75, 4), 78)
    assert sum(manifest.indexer_types) == 21
    apart = description.straddling(description.layers(manifest))
    assert {layer.number: layer.files for layer in apart} == {20: (1, 2), 38: (2, 3), 55: (3, 4), 73: (4, 5)}


def test_cache_and_stop_tokens(manifest: Manifest) -> None:
    assert manifest.kv_bytes_per_token(0, 78) == 78 * 1152 + 21 * 256 == 93 * 1024
    assert manifest.kv_bytes_per_token(6, 10) == 4 * 1152 + 256
    assert manifest.kv_bytes_per_token(74, 78, mtp=True) == 5 * 1152 + 256
    assert manifest.stop_tokens == tuple(glm52.STOPS)


def test_the_exit_with_mtp_also_needs_the_embedding(manifest: Manifest) -> None:
    plain = {tensor.name for tensor in manifest.span_tensors(74, 78)}
    drafting = {tensor.name for tensor in manifest.span_tensors(74, 78, mtp=True)}
    added = drafting - plain
    assert "token_embd.weight" in added
    assert {layer_of(name) for name in added} == {None, 78}
    assert not any(".indexer." in name for name in added)  # the MTP block attends densely


def test_dead_indexers_are_not_needed(manifest: Manifest) -> None:
    held = [tensor.name for tensor in manifest.span_tensors(6, 10) if ".indexer." in tensor.name]
    assert held
    assert all(name.startswith("blk.6.") for name in held)
    assert manifest.layer_bytes[7] == CLASS_A - 10_535_936


# --- files of this layout


def test_the_headers_of_the_table_end_where_the_tensors_begin(folder: Path, manifest: Manifest) -> None:
    # three keys and the table, padded to 32: nothing else fits in
    for file in manifest.files:
        assert read_header(folder / file.name).header.header_bytes == file.header_bytes


def test_the_id_is_what_the_files_would_give(folder: Path, manifest: Manifest) -> None:
    expected = with_metadata_of(folder, manifest)
    glm52.keep_digests(folder, expected)
    try:
        loaded = load_manifest(folder / manifest.files[3].name)
    finally:
        for kept in folder.glob("*.json"):
            kept.unlink()
    assert loaded == replace(expected, name="GLM-5.2-UD-IQ1_S")
    real = replace(loaded, header_sha256=manifest.header_sha256, files=manifest.files)
    assert real.artifact_id == GLM52.artifact_id


def test_202_gib_are_opened_at_once_and_said_to_be_unread(folder: Path, manifest: Manifest) -> None:
    expected = with_metadata_of(folder, manifest)
    start = time.process_time()
    copy = check_copy(expected, folder)
    assert time.process_time() - start < 2
    assert copy.manifest == expected
    assert [path.name for path in copy.unread] == [file.name for file in manifest.files[1:]]
    assert copy.remarks == ()


def test_files_with_other_metadata_are_not_the_artifact(folder: Path, manifest: Manifest) -> None:
    model = find_model("GLM-5.2-UD-IQ1_S", folder)
    assert model == LocalModel(folder / manifest.files[0].name, GLM52.name)
    with pytest.raises(ArtifactMismatch, match=r"00001-of-00006\.gguf: its metadata are not those of glm-5\.2-ud-iq1_"):
        open_model(model)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"feed_forward_length": 10_944}, "n_ff is 10944, the manifest 12288"),
        ({"context_length": 131_072}, r"n_ctx_train is 131072, the manifest 1048576"),
        ({"attention_indexer_top_k": 64}, "top_k is 64, the manifest 2048"),
        ({"block_count": 75}, "n_layers is 74, the manifest 78"),
    ],
)
def test_a_fact_that_differs_is_named(
    tmp_path: Path, manifest: Manifest, changes: dict[str, int], difference: str
) -> None:
    glm52.write(tmp_path, manifest, **changes)
    with pytest.raises(ArtifactMismatch, match=re.escape(f"({difference})")):
        check_copy(manifest, tmp_path)


# --- memory


@pytest.mark.parametrize("context", [4096, 32_768, 131_072])
def test_memory_of_four_layers(manifest: Manifest, context: int) -> None:
    memory = estimate(manifest, 10, 14, (ContextSpec(1, context),))
    assert memory.weights_bytes == 4 * CLASS_A - 3 * 10_535_936  # as the engine reports
    assert memory.kv_bytes == context * (4 * 1152 + 256)
    # hidden states of a chunk beside weights, cache and buffers: 11 GiB hold 4,096 tokens, 12 hold 131,072
    assert 10.6 < (memory.total_bytes / GIB) < (11 if context == 4096 else 12)

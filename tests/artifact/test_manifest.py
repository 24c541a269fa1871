from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.artifact.cuts import check_span
from swarm.artifact.manifest import Manifest, load_manifest
from swarm.errors import ArtifactError, ArtifactMismatch, NotAModel, SpanError, SwarmError, UnsupportedModel
from tests.artifact import files

EMBEDDING_BYTES = files.N_VOCAB * files.N_EMBD * 4
NORM_BYTES = files.N_EMBD * 4
INDEXER_BYTES = 32 * files.N_EMBD * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("manifest")


@pytest.fixture(scope="module")
def glm(folder: Path) -> Manifest:
    full = (True, True, False, True, False, False)
    return load_manifest(files.write_glm(folder / "glm.gguf", 6, full=full))


@pytest.fixture(scope="module")
def glm52_shape(folder: Path) -> Manifest:
    return load_manifest(files.write_glm(folder / "deep.gguf", 78, n_ctx=1 << 20))


def test_smollm2(smollm2_path: Path) -> None:
    manifest = load_manifest(smollm2_path)
    assert (manifest.arch, manifest.n_layers, manifest.n_mtp, manifest.top_k) == ("llama", 30, 0, 0)
    assert (manifest.n_embd, manifest.n_vocab, manifest.n_ctx_train) == (576, 49152, 8192)
    assert manifest.cuts == tuple(range(31))
    assert manifest.is_tied
    assert manifest.stop_tokens == (2,)
    assert manifest.files[0].sha256 == hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    # everything behind the header is tensors
    data = smollm2_path.stat().st_size - manifest.files[0].header_bytes
    assert data - 32 < manifest.span_bytes(0, 30) <= data
    # 3 KV heads of 64, key and value, f16
    assert manifest.kv_bytes_per_token(0, 30) == 30 * 2 * 3 * 64 * 2
    assert manifest.kv_bytes(10, 12, 100, kv_type=8) == 100 * 2 * 2 * (3 * 64 // 32) * 34


def test_spans_partition_the_tensors_of_an_untied_model(folder: Path) -> None:
    manifest = load_manifest(files.write_llama(folder / "untied.gguf", 4, rope_factors=True))
    parts = [manifest.span_tensors(*span) for span in ((0, 1), (1, 3), (3, 4))]
    shared = "rope_freqs.weight"
    assert all(shared in {tensor.name for tensor in part} for part in parts)
    owned = [tensor.name for part in parts for tensor in part if tensor.name != shared]
    assert sorted([*owned, shared]) == sorted(tensor.name for tensor in manifest.tensors)
    assert "token_embd.weight" in {tensor.name for tensor in parts[0]}
    assert {"output.weight", "output_norm.weight"} <= {tensor.name for tensor in parts[2]}


def test_a_tied_exit_needs_the_embedding(folder: Path) -> None:
    manifest = load_manifest(files.write_llama(folder / "tied.gguf", 4, tied=True))
    layer = manifest.layer_bytes[0]
    assert manifest.span_bytes(0, 2) == 2 * layer + EMBEDDING_BYTES
    assert manifest.span_bytes(1, 3) == 2 * layer
    assert manifest.span_bytes(2, 4) == 2 * layer + EMBEDDING_BYTES + NORM_BYTES
    assert manifest.span_bytes(0, 4) == 4 * layer + EMBEDDING_BYTES + NORM_BYTES  # once


def test_glm_leaves_out_what_no_graph_reads(glm: Manifest) -> None:
    assert glm.cuts == (0, 1, 3, 6)
    own, shared = NORM_BYTES + INDEXER_BYTES, NORM_BYTES
    block = NORM_BYTES + 2 * files.N_EMBD * files.N_EMBD * 4
    assert glm.layer_bytes == (own, own, shared, own, shared, shared, block)
    exit_bytes = own + 2 * shared + EMBEDDING_BYTES + NORM_BYTES
    assert glm.span_bytes(3, 6) == exit_bytes
    assert glm.span_bytes(3, 6, mtp=True) == exit_bytes + block + EMBEDDING_BYTES
    assert glm.span_bytes(1, 3, mtp=True) == own + shared
    assert glm.span_bytes(0, 6, mtp=True) == sum(glm.layer_bytes) + 2 * EMBEDDING_BYTES + NORM_BYTES


def test_indexers_that_no_layer_runs_may_be_absent(glm: Manifest, folder: Path) -> None:
    full = glm.indexer_types
    lean = load_manifest(files.write_glm(folder / "lean.gguf", 6, full=full, dead_indexers=False))
    named = {tensor.name for tensor in lean.tensors}
    assert len(glm.tensors) - len(named) == 4  # three shared layers and the MTP block
    assert lean.layer_bytes == glm.layer_bytes
    assert lean.cuts == glm.cuts
    assert lean.kv_widths == glm.kv_widths
    for span in ((0, 1), (1, 3), (3, 6)):
        needed = [[tensor.name for tensor in one.span_tensors(*span, mtp=True)] for one in (lean, glm)]
        assert needed[0] == needed[1]
        assert set(needed[0]) <= named


def test_the_schedule_is_the_same_from_the_key_and_without_it(glm52_shape: Manifest, folder: Path) -> None:
    full = glm52_shape.indexer_types
    keyed = load_manifest(files.write_glm(folder / "keyed.gguf", 78, full=full, n_ctx=1 << 20, dead_indexers=False))
    assert keyed.indexer_types == full
    assert keyed.layer_bytes == glm52_shape.layer_bytes


def test_glm_caches_keys_only(glm: Manifest) -> None:
    # 96 values of MLA key per token and layer, 32 of indexer key where the layer has its own
    assert glm.kv_bytes_per_token(0, 6) == 2 * (6 * 96 + 3 * 32)
    assert glm.kv_bytes_per_token(1, 3) == 2 * (2 * 96 + 32)
    assert glm.kv_bytes_per_token(3, 6, mtp=True) == 2 * (3 * 96 + 32 + 96)
    assert glm.kv_bytes_per_token(1, 3, mtp=True) == glm.kv_bytes_per_token(1, 3)
    assert glm.kv_bytes(0, 1, 10, kv_type=0) == 10 * 4 * (96 + 32)


def test_glm_stop_tokens_are_found_by_text(glm: Manifest) -> None:
    assert glm.stop_tokens == (*files.GLM_STOPS, files.N_VOCAB - 1)


def test_glm52s_schedule_applies_without_the_key(glm52_shape: Manifest) -> None:
    full = [layer for layer in range(78) if glm52_shape.indexer_types[layer]]
    assert full == [0, 1, 2, *range(6, 75, 4)]
    assert glm52_shape.cuts == (*full, 78)
    check_span(glm52_shape, 6, 14)
    with pytest.raises(SpanError, match=r"may not be cut at 7.*cut at 6 or 10 instead"):
        check_span(glm52_shape, 0, 7)


@pytest.mark.parametrize(
    ("n_layers", "n_ctx", "full", "cuts"),
    [
        (10, 1 << 20, None, (0, 1, 2, 6, 10)),  # the engine takes the schedule at any depth
        (10, (1 << 20) - 1, None, tuple(range(11))),
        (5, 1 << 20, [True] * 5, (0, 1, 2, 3, 4, 5)),
        (5, 4096, [True, False, False, True, False], (0, 3, 5)),
    ],
)
def test_indexer_types(
    n_layers: int, n_ctx: int, full: list[bool] | None, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    assert load_manifest(files.write_glm(tmp_path / "g.gguf", n_layers, n_ctx=n_ctx, full=full)).cuts == cuts


@pytest.mark.parametrize("full", [[True] * 5, [False, True, True, True], [True] * 3])
def test_indexer_types_that_do_not_fit_are_refused(full: list[bool], tmp_path: Path) -> None:
    with pytest.raises(NotAModel, match=r"g\.gguf: .*convert the model anew"):
        load_manifest(files.write_glm(tmp_path / "g.gguf", 4, full=full))


def test_declared_mtp_without_tensors_is_none(tmp_path: Path) -> None:
    manifest = load_manifest(files.write_glm(tmp_path / "g.gguf", 4, mtp_tensors=False))
    assert (manifest.n_layers, manifest.n_mtp) == (4, 0)
    assert manifest.span_bytes(0, 4, mtp=True) == manifest.span_bytes(0, 4)


def test_other_architectures_are_refused_with_the_supported_ones(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"other\.gguf: architecture 'gpt2' .* llama, glm-dsa") as caught:
        load_manifest(path)
    assert caught.value.exit_code == 3


def test_layers_without_tensors_are_noticed(tmp_path: Path) -> None:
    path = files.write_llama(tmp_path / "a.gguf", 3)
    data = path.read_bytes().replace(b"blk.1.attn_norm.weight", b"blk.9.attn_norm.weight")
    path.write_bytes(data)
    with pytest.raises(NotAModel, match=r"incomplete: blk\.1\.attn_norm\.weight is missing; download the whole model"):
        load_manifest(path)


def test_the_id_follows_content_and_not_names(folder: Path, glm: Manifest) -> None:
    moved = folder / "elsewhere"
    moved.mkdir()
    shutil.copy(folder / "glm.gguf", moved / "renamed.gguf")
    same = load_manifest(moved / "renamed.gguf")
    assert same.name == "renamed"
    assert same.artifact_id == glm.artifact_id
    changed = bytearray((folder / "glm.gguf").read_bytes())
    changed[-1] ^= 1
    (moved / "changed.gguf").write_bytes(changed)
    assert load_manifest(moved / "changed.gguf").artifact_id != glm.artifact_id


def test_a_split_set_is_one_artifact_from_any_file(tmp_path: Path) -> None:
    first = files.write_glm(tmp_path / "model.gguf", 6, split_tensors=4)
    shards = sorted(tmp_path.glob("*.gguf"))
    manifest = load_manifest(first)
    assert manifest.name == "model"
    assert [file.name for file in manifest.files] == [shard.name for shard in shards]
    assert {load_manifest(shard).artifact_id for shard in shards} == {manifest.artifact_id}
    whole = load_manifest(files.write_glm(tmp_path / "whole.gguf", 6))
    assert manifest.layer_bytes == whole.layer_bytes
    assert manifest.artifact_id != whole.artifact_id
    for tensor in manifest.tensors:
        assert tensor.offset + tensor.bytes <= shards[tensor.file].stat().st_size


# --- the document ---------------------------------------------------------------------------------------------------


def test_the_document_is_its_own_identity(glm: Manifest) -> None:
    document = glm.to_json()
    assert hashlib.sha256(document).hexdigest() == glm.artifact_id
    copy = Manifest.from_json(document, glm.artifact_id, name="glm")
    assert copy.artifact_id == glm.artifact_id
    assert copy.tensors == glm.tensors
    assert copy.kv_widths == glm.kv_widths
    assert copy.cuts == glm.cuts
    assert copy.name == "glm"
    assert Manifest.from_json(document).name == glm.artifact_id[:12]
    assert [copy.span_bytes(a, b, mtp) for a in (0, 1) for b in (3, 6) for mtp in (False, True)] == [
        glm.span_bytes(a, b, mtp) for a in (0, 1) for b in (3, 6) for mtp in (False, True)
    ]


def test_a_document_of_1800_tensors_is_compact(glm52_shape: Manifest) -> None:
    # GLM-5.2 has 1,809 tensors
    per_tensor = len(glm52_shape.to_json()) / len(glm52_shape.tensors)
    assert per_tensor * 1809 < 300_000


def test_another_artifact_is_a_mismatch(glm: Manifest, glm52_shape: Manifest) -> None:
    with pytest.raises(ArtifactMismatch, match="ask another peer"):
        Manifest.from_json(glm.to_json(), glm52_shape.artifact_id)


Change = Callable[[dict[str, Any]], None]


def _set(*path: str | int, to: object) -> Change:
    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


def _drop(*path: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        place = document
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


HOSTILE: dict[str, Change] = {
    "the format before": _set("format", to=1),
    "other format": _set("format", to=3),
    "unknown field": _set("extra", to=1),
    "no tensors": _set("tensors", to=[]),
    "no files": _set("files", to=[]),
    "missing field": _drop("model", "n_embd"),
    "layers as text": _set("model", "n_layers", to="6"),
    "layers as a fraction": _set("model", "n_layers", to=6.0),
    "layers as truth": _set("model", "n_layers", to=True),
    "a million layers": _set("model", "n_layers", to=1_000_000),
    "fewer layers": _set("model", "n_layers", to=5),
    "no layers": _set("model", "n_layers", to=0),
    "wide embedding": _set("model", "n_embd", to=1 << 40),
    "first layer shared": _set("model", "indexer_types", 0, to=False),
    "kv of fewer layers": _set("model", "kv_widths", to=[[96]]),
    "negative kv": _set("model", "kv_widths", 0, to=[-1]),
    "stop token outside": _set("model", "stop_tokens", to=[files.N_VOCAB]),
    "odd architecture": _set("model", "arch", to="glm-dsa\n"),
    "unknown architecture": _set("model", "arch", to="qwen"),
    "stop token twice": _set("model", "stop_tokens", to=[2, 2]),
    "another vocabulary": _set("model", "n_vocab", to=files.N_VOCAB + 1),
    "another width": _set("model", "n_embd", to=files.N_EMBD * 2),
    "tensor without dimensions": _set("tensors", 1, 4, to=[]),
    "tensor of broken blocks": _set("tensors", 1, 3, to="Q2_K"),
    "digest too short": _set("files", 0, 1, to="ab"),
    "header digest too short": _set("header_sha256", to="ab"),
    "no header digest": _drop("header_sha256"),
    "digest with newline": _set("files", 0, 1, to="a" * 64 + "\n"),
    "negative size": _set("files", 0, 0, to=-1),
    "header beyond the file": _set("files", 0, 2, to=1 << 27),
    "header before the tensors": _set("files", 0, 2, to=32),
    "tensor in no file": _set("tensors", 0, 1, to=1),
    "tensor before the data": _set("tensors", 0, 2, to=0),
    "tensor beyond the file": _set("tensors", -1, 2, to=1 << 50),
    "tensors overlap": _set("tensors", 1, 2, to=1 << 10),
    "tensor of no type": _set("tensors", 0, 3, to="F17"),
    "tensor of huge shape": _set("tensors", 0, 4, to=[1 << 62, 1 << 62, 1 << 62, 1 << 62]),
    "tensor of five dimensions": _set("tensors", 0, 4, to=[1, 1, 1, 1, 1]),
    "tensor with a path": _set("tensors", 0, 0, to="../../etc/passwd"),
    "tensor twice": _set("tensors", 1, 0, to="token_embd.weight"),
    "tensor with more parts": _set("tensors", 0, to=["a", 0, 0, "F32", [1], 1]),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_documents_are_refused(glm: Manifest, change: Change) -> None:
    document = json.loads(glm.to_json())
    change(document)
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(ArtifactError, match=r"makes no sense .*; ask another peer$") as caught:
        Manifest.from_json(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b"{" * 100_000, b"[" * 100_000, b"\xff\xfe", b"1" * 5000, b" " * (9 << 20)]
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="ask another peer"):
        Manifest.from_json(data)


def test_only_the_canonical_form_is_taken(glm: Manifest) -> None:
    document = json.loads(glm.to_json())
    with pytest.raises(ArtifactError, match="canonical"):
        Manifest.from_json(json.dumps(document).encode())
    with pytest.raises(ArtifactError, match="canonical"):
        Manifest.from_json(glm.to_json() + b"\n")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 1 << 20), piece=st.binary(min_size=1, max_size=6))
def test_a_mutated_document_is_refused_or_has_another_id(glm: Manifest, at: int, piece: bytes) -> None:
    data = bytearray(glm.to_json())
    at %= len(data)
    data[at : at + len(piece)] = piece
    mutated = bytes(data)
    if mutated == glm.to_json():
        return
    with pytest.raises(SwarmError):
        Manifest.from_json(mutated, glm.artifact_id)
    try:
        other = Manifest.from_json(mutated)
    except ArtifactError:
        return
    assert other.artifact_id == hashlib.sha256(mutated).hexdigest() != glm.artifact_id

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from shim.vocab import Vocab
from swarm.artifact import gguf_file
from swarm.artifact.header import check_header, header_bytes, vocabulary_gguf
from swarm.artifact.manifest import load_manifest
from swarm.errors import ArtifactMismatch, NotAModel
from tests.artifact import files


def test_the_vocabulary_file_keeps_the_metadata_and_nothing_else(tmp_path: Path) -> None:
    model = files.write_llama(tmp_path / "model.gguf")
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(vocabulary_gguf(header_bytes(model)))
    whole, small = gguf.GGUFReader(model), gguf.GGUFReader(path)
    own = {key for key in whole.fields if not key.startswith("GGUF.")}
    assert {key for key in small.fields if not key.startswith("GGUF.")} == own
    assert all(small.fields[key].contents() == whole.fields[key].contents() for key in own)
    assert small.fields["tokenizer.ggml.tokens"].contents() == files.TOKENS
    assert not small.tensors


def test_the_engine_reads_its_tokenizer_from_it(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(vocabulary_gguf(header_bytes(smollm2_path)))
    small, whole = Vocab.load(path), Vocab.load(smollm2_path)
    text = "The capital of France is Paris.<|im_end|>\n"
    assert small.encode(text) == whole.encode(text)
    assert small.template == whole.template
    assert small.stop_tokens == whole.stop_tokens >= set(load_manifest(smollm2_path).stop_tokens)


def test_the_engine_reads_it_from_the_first_file_of_a_split_set(tmp_path: Path) -> None:
    first = files.write_glm(tmp_path / "model.gguf", split_tensors=5)
    path = tmp_path / "vocabulary"
    path.write_bytes(vocabulary_gguf(header_bytes(first)))
    assert Vocab.load(path).size == files.N_VOCAB


def test_the_split_keys_go(tmp_path: Path) -> None:
    first = files.write_glm(tmp_path / "model.gguf", split_tensors=5)
    path = tmp_path / "vocabulary"
    path.write_bytes(vocabulary_gguf(header_bytes(first)))
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.tokens"].contents() == files.TOKENS
    assert not any(key.startswith("split.") for key in fields)
    assert any(key.startswith("split.") for key in gguf.GGUFReader(first).fields)


def test_header_bytes_are_checked_against_the_manifest(tmp_path: Path) -> None:
    path = files.write_llama(tmp_path / "a.gguf")
    manifest = load_manifest(path)
    raw = header_bytes(path)
    assert path.read_bytes().startswith(raw)
    check_header(raw, manifest)
    for wrong in (raw[:-1], raw + b"\0", b"X" + raw[1:], b""):
        with pytest.raises(ArtifactMismatch, match="ask another peer"):
            check_header(wrong, manifest)


def test_a_header_that_is_none_is_refused() -> None:
    with pytest.raises(NotAModel):
        vocabulary_gguf(b"GGUF but not really")


def test_a_header_ends_where_the_tensors_begin_and_a_file_without_tensors_is_all_header(tmp_path: Path) -> None:
    first = files.write_glm(tmp_path / "model.gguf", split_tensors=5)
    manifest = load_manifest(first)
    assert manifest.files[0].header_bytes == manifest.files[0].size_bytes == first.stat().st_size
    assert manifest.header_sha256 == manifest.files[0].sha256
    for index, file in enumerate(manifest.files[1:], 1):
        assert file.header_bytes == min(tensor.offset for tensor in manifest.tensors if tensor.file == index)
        assert file.header_bytes % 32 == 0


def test_a_large_file_without_tensors_is_read_whole_as_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 24 << 20)
    path = tmp_path / "metadata.gguf"
    small = vocabulary_gguf(header_bytes(files.write_llama(tmp_path / "model.gguf")))
    path.write_bytes(small + bytes((20 << 20) - len(small)))
    assert len(header_bytes(path)) == 20 << 20
    with path.open("r+b") as stream:
        stream.truncate((24 << 20) + 1)
    with pytest.raises(NotAModel, match=r"metadata\.gguf: its header is larger than 24 MiB; download it again"):
        header_bytes(path)

"""Reading a manifest that came from a stranger: bounds on everything, then the rules that tie the parts together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from swarm.artifact import ggml_types
from swarm.artifact.facts import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, SUPPORTED, ModelFacts
from swarm.artifact.gguf_file import MAX_DIMS, MAX_ELEMENTS, MAX_FILES, MAX_HEADER_BYTES, MAX_TENSORS
from swarm.artifact.manifest import FORMAT, MAX_DOCUMENT_BYTES, FileEntry, Manifest, TensorEntry
from swarm.errors import ArtifactError, ArtifactMismatch

_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
_Width = Annotated[int, Field(ge=0, le=MAX_WIDTH)]
_Offset = Annotated[int, Field(ge=0, le=1 << 60)]
_Dims = Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_ELEMENTS)], ...], Field(min_length=1, max_length=MAX_DIMS)]
_TensorName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,63}\z")]
_File = tuple[_Offset, _Sha256, Annotated[int, Field(ge=1, le=MAX_HEADER_BYTES)]]
_Tensor = tuple[_TensorName, Annotated[int, Field(ge=0, lt=MAX_FILES)], _Offset, str, _Dims]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Model(_Strict):
    """The fields of ``ModelFacts``."""

    arch: Annotated[str, StringConstraints(pattern=r"^[a-z0-9\-]{1,32}\z")]
    n_layers: int = Field(ge=1, le=MAX_LAYERS)
    n_mtp: int = Field(ge=0, le=MAX_LAYERS)
    n_embd: int = Field(ge=1, le=MAX_WIDTH)
    n_vocab: int = Field(ge=1, le=MAX_VOCAB)
    n_ctx_train: int = Field(ge=1, le=1 << 31)
    n_head: int = Field(ge=1, le=1 << 16)
    n_ff: _Width
    n_expert_used: int = Field(ge=0, le=1 << 16)
    n_ff_expert: _Width
    n_expert_shared: int = Field(ge=0, le=1 << 16)
    key_length: int = Field(ge=1, le=MAX_WIDTH)
    top_k: int = Field(ge=0, le=1 << 31)
    indexer_heads: int = Field(ge=0, le=1 << 16)
    indexer_types: Annotated[tuple[bool, ...], Field(max_length=MAX_LAYERS)]
    kv_widths: Annotated[
        tuple[Annotated[tuple[Annotated[int, Field(ge=0, le=1 << 36)], ...], Field(max_length=4)], ...],
        Field(max_length=2 * MAX_LAYERS),
    ]
    stop_tokens: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_VOCAB)], ...], Field(max_length=64)]


class _Document(_Strict):
    format: Literal[FORMAT]  # type: ignore[valid-type]
    model: _Model
    header_sha256: _Sha256
    files: Annotated[tuple[_File, ...], Field(min_length=1, max_length=MAX_FILES)]
    tensors: Annotated[tuple[_Tensor, ...], Field(min_length=1, max_length=MAX_TENSORS)]


def read_document(data: bytes, name: str, expected_id: str | None) -> Manifest:
    if len(data) > MAX_DOCUMENT_BYTES:
        raise _malformed(f"it has {len(data)} bytes")
    try:
        document = _Document.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"][:4])
        raise _malformed(f"{place}: {first['msg']}" if place else first["msg"]) from None
    artifact_id = hashlib.sha256(data).hexdigest()
    manifest = _build(document, name or artifact_id[:12])
    _check(manifest)
    if manifest.artifact_id != artifact_id:
        raise _malformed("it is not in canonical form")
    if expected_id is not None and artifact_id != expected_id:
        raise ArtifactMismatch(
            f"a peer served the manifest of artifact {artifact_id[:12]} instead of {expected_id[:12]}; ask another peer"
        )
    return manifest


def _build(document: _Document, name: str) -> Manifest:
    for tensor, _, _, kind, dims in document.tensors:
        if not ggml_types.is_type(kind):
            raise _malformed(f"tensor {tensor} has an unknown type")
        if dims[0] % ggml_types.block_elements(kind):
            raise _malformed(f"tensor {tensor} has rows that are no multiple of its type's block")
    return Manifest(
        **document.model.model_dump(),
        name=name,
        header_sha256=document.header_sha256,
        files=tuple(FileEntry("", *file) for file in document.files),
        tensors=tuple(
            TensorEntry(tensor, file, offset, ggml_types.tensor_bytes(kind, dims), kind, dims)
            for tensor, file, offset, kind, dims in document.tensors
        ),
    )


def _check(manifest: Manifest) -> None:
    _check_model(manifest)
    embedding = next((tensor.dims for tensor in manifest.tensors if tensor.name == "token_embd.weight"), None)
    if embedding != (manifest.n_embd, manifest.n_vocab):
        raise _malformed("token_embd.weight does not fit the model's width and vocabulary")
    _check_table(manifest.files, manifest.tensors)


def _check_model(facts: ModelFacts) -> None:
    if facts.indexer_types and (len(facts.indexer_types) != facts.n_layers or not facts.indexer_types[0]):
        raise _malformed("indexer_types does not fit the layers")
    if len(facts.kv_widths) != facts.n_layers + facts.n_mtp:
        raise _malformed("kv_widths does not fit the layers")
    if facts.arch not in SUPPORTED:
        raise _malformed(f"architecture {facts.arch} can't be served in spans")
    if len(set(facts.stop_tokens)) != len(facts.stop_tokens):
        raise _malformed("a stop token comes twice")
    if any(token >= facts.n_vocab for token in facts.stop_tokens):
        raise _malformed("a stop token is outside the vocabulary")


def _check_table(files: Sequence[FileEntry], tensors: Sequence[TensorEntry]) -> None:
    _check_headers(files, tensors)
    ends = [file.header_bytes for file in files]
    names: set[str] = set()
    for tensor in tensors:
        if tensor.file >= len(files):
            raise _malformed(f"tensor {tensor.name} lies in a file that does not exist")
        if tensor.offset < ends[tensor.file] or tensor.offset + tensor.bytes > files[tensor.file].size_bytes:
            raise _malformed(f"tensor {tensor.name} overlaps another part of its file or ends beyond it")
        if tensor.name in names:
            raise _malformed(f"tensor {tensor.name} comes twice")
        names.add(tensor.name)
        ends[tensor.file] = tensor.offset + tensor.bytes


def _check_headers(files: Sequence[FileEntry], tensors: Sequence[TensorEntry]) -> None:
    """A header ends where the file's first tensor begins, or with the file."""
    ends = {index: file.size_bytes for index, file in enumerate(files)}
    ends.update((tensor.file, tensor.offset) for tensor in reversed(tensors))
    if any(file.header_bytes != ends[index] for index, file in enumerate(files)):
        raise _malformed("a header ends elsewhere than its file's tensors begin")


def _malformed(what: str) -> ArtifactError:
    return ArtifactError(f"a peer served a manifest that makes no sense ({what}); ask another peer")

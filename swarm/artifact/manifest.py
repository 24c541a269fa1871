"""The manifest: what an artifact is made of, and what each part of it weighs.

``artifact_id`` is the SHA-256 of the manifest's canonical JSON. Names of files and of the model are not in it: the
same bytes under other names are the same artifact, and a name from a stranger proves nothing. Everything else counts,
derived values too, so that two programs that read a model differently do not meet in one chain.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from swarm.artifact import ggml_types
from swarm.artifact.digest import Progress, file_digests
from swarm.artifact.facts import ModelFacts, read_facts
from swarm.artifact.gguf_file import TensorInfo
from swarm.artifact.gguf_set import GgufSet, display_name, open_gguf
from swarm.ids import ArtifactId

FORMAT = 2
MAX_NAME = 128
MAX_DOCUMENT_BYTES = 8 << 20  # GLM-5.2's has about 150 KB

_KV_TYPES = {0: "F32", 1: "F16", 8: "Q8_0"}
_LAYER = re.compile(r"blk\.(\d+)\.", re.ASCII)
_ENTRY = "token_embd."
_EXIT = ("output.", "output_norm.")


@dataclass(frozen=True)
class FileEntry:
    """One file. The name is the local one, empty in a manifest from a peer. The header runs from byte 0 to the first
    byte of tensor data, padding included; a file without tensors is all header."""

    name: str
    size_bytes: int
    sha256: str
    header_bytes: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. ``offset`` counts from the start of file number ``file``; ``dims`` has the row first."""

    name: str
    file: int
    offset: int
    bytes: int
    type: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Manifest(ModelFacts):
    """The model's facts, its files and its tensor table. Only the first file's header carries metadata, so only that
    one has a digest of its own: the others' say nothing that the table does not."""

    name: str
    header_sha256: str
    files: tuple[FileEntry, ...] = field(repr=False)
    tensors: tuple[TensorEntry, ...] = field(repr=False)

    @cached_property
    def artifact_id(self) -> ArtifactId:
        return ArtifactId(hashlib.sha256(self.to_json()).hexdigest())

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def is_tied(self) -> bool:
        """Whether the exit reads its output matrix from ``token_embd``."""
        return not any(tensor.name == "output.weight" for tensor in self.tensors)

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Weights of each layer, MTP blocks at the end; what no graph reads is left out."""
        return tuple(_bytes(self._by_layer.get(layer, ())) for layer in range(self.n_layers + self.n_mtp))

    def span_tensors(self, first: int, last: int, *, mtp: bool = False) -> tuple[TensorEntry, ...]:
        """The tensors a node needs for layers [first, last), each once, in file order."""
        needed = {*range(first, last)}
        if mtp and last == self.n_layers:
            needed.update(range(self.n_layers, self.n_layers + self.n_mtp))
        layers = (tensor for layer in needed for tensor in self._by_layer.get(layer, ()))
        whole = (tensor for tensor in self._without_layer if self._needs(tensor, first, last, mtp=mtp))
        return tuple(sorted((*layers, *whole), key=lambda tensor: (tensor.file, tensor.offset)))

    def span_bytes(self, first: int, last: int, mtp: bool = False) -> int:
        """Weights of layers [first, last), with embedding and output where the span owns them."""
        return _bytes(self.span_tensors(first, last, mtp=mtp))

    def kv_bytes_per_token(self, first: int, last: int, kv_type: int = 1, mtp: bool = False) -> int:
        """Bytes one token takes in the KV cache of layers [first, last). ``kv_type`` is ggml's number."""
        end = last + self.n_mtp if mtp and last == self.n_layers else last
        kind = _KV_TYPES[kv_type]
        return sum(ggml_types.row_bytes(kind, width) for widths in self.kv_widths[first:end] for width in widths)

    def kv_bytes(self, first: int, last: int, tokens: int, kv_type: int = 1, mtp: bool = False) -> int:
        return tokens * self.kv_bytes_per_token(first, last, kv_type, mtp)

    def with_file_names(self, names: Sequence[str]) -> Manifest:
        """The same artifact, its files under these names."""
        files = zip(self.files, names, strict=True)
        return replace(self, files=tuple(replace(file, name=name) for file, name in files))

    def to_json(self) -> bytes:
        """The canonical form, served to others: its SHA-256 is the artifact id."""
        model = {part.name: getattr(self, part.name) for part in fields(ModelFacts)}
        files = [[file.size_bytes, file.sha256, file.header_bytes] for file in self.files]
        tensors = [[tensor.name, tensor.file, tensor.offset, tensor.type, tensor.dims] for tensor in self.tensors]
        document = {
            "format": FORMAT,
            "model": model,
            "header_sha256": self.header_sha256,
            "files": files,
            "tensors": tensors,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def from_json(cls, data: bytes, expected_id: str | None = None, *, name: str = "") -> Manifest:
        """Reads what a stranger served. Raises ``ArtifactError`` when it makes no sense, ``ArtifactMismatch`` when its
        id is not the expected one. ``name`` is for display; without one the id's first digits are shown."""
        from swarm.artifact.manifest_document import read_document  # it knows this class

        return read_document(data, name, expected_id)

    def _needs(self, tensor: TensorEntry, first: int, last: int, *, mtp: bool) -> bool:
        is_exit = last == self.n_layers
        if tensor.name.startswith(_ENTRY):
            return first == 0 or (is_exit and (self.is_tied or (mtp and self.n_mtp > 0)))
        if tensor.name.startswith(_EXIT):
            return is_exit
        return True  # rope factors: every layer reads them

    @cached_property
    def _by_layer(self) -> Mapping[int, tuple[TensorEntry, ...]]:
        groups: dict[int, list[TensorEntry]] = {}
        for tensor in self.tensors:
            layer = layer_of(tensor.name)
            if layer is not None and not self._is_dead(layer, tensor):
                groups.setdefault(layer, []).append(tensor)
        return {layer: tuple(group) for layer, group in groups.items()}

    @cached_property
    def _without_layer(self) -> tuple[TensorEntry, ...]:
        return tuple(tensor for tensor in self.tensors if layer_of(tensor.name) is None)

    def _is_dead(self, layer: int, tensor: TensorEntry) -> bool:
        """GLM-5.2's file has indexer tensors in layers, and in the MTP block, that never run them."""
        if not self.indexer_types or not tensor.name.startswith(f"blk.{layer}.indexer."):
            return False
        return layer >= self.n_layers or not self.indexer_types[layer]


def layer_of(tensor_name: str) -> int | None:
    """The layer, or MTP block, that a tensor belongs to."""
    match = _LAYER.match(tensor_name)
    return None if match is None else int(match[1])


def load_manifest(path: Path | str, progress: Progress | None = None) -> Manifest:
    """Manifest of a GGUF; any file of a split set stands for the set. Digests are kept beside the files, so only the
    first call reads them whole; ``progress(bytes done, bytes in all)`` may raise to stop that."""
    return manifest_of(open_gguf(Path(path)), progress)


def manifest_of(opened: GgufSet, progress: Progress | None = None) -> Manifest:
    """``load_manifest`` of a set that is open."""
    tensors = {tensor.name: tensor for file in opened.files for tensor in file.header.tensors}
    facts = read_facts(opened.metadata, tensors)
    digests = file_digests([file.path for file in opened.files], progress)
    return Manifest(
        **{part.name: getattr(facts, part.name) for part in fields(ModelFacts)},
        name=display_name(opened.files[0].path)[:MAX_NAME],
        header_sha256=hashlib.sha256(opened.files[0].header.raw).hexdigest(),
        files=tuple(_file_entries(opened, digests)),
        tensors=tuple(_tensor_entries(opened)),
    )


def _file_entries(opened: GgufSet, digests: Iterable[str]) -> Iterable[FileEntry]:
    for file, digest in zip(opened.files, digests, strict=True):
        yield FileEntry(file.path.name, file.size_bytes, digest, file.header.header_bytes)


def _tensor_entries(opened: GgufSet) -> Iterable[TensorEntry]:
    for index, file in enumerate(opened.files):
        yield from (_tensor_entry(index, tensor) for tensor in file.header.tensors)


def _tensor_entry(file: int, tensor: TensorInfo) -> TensorEntry:
    return TensorEntry(file=file, **asdict(tensor))


def _bytes(tensors: Iterable[TensorEntry]) -> int:
    return sum(tensor.bytes for tensor in tensors)

"""GLM-5.2's six files as far as headers go: right sizes, tables and offsets, no data. They are sparse, so they take the
few bytes of their headers on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from struct import pack

import gguf

from swarm.artifact.manifest import Manifest, TensorEntry

STOPS = {154_820: "<|endoftext|>", 154_827: "<|user|>", 154_829: "<|observation|>"}
# what the converter writes for this model, as far as the program reads it
METADATA = {
    "context_length": 1 << 20,
    "embedding_length": 6144,
    "block_count": 79,
    "nextn_predict_layers": 1,
    "feed_forward_length": 12_288,
    "expert_feed_forward_length": 2048,
    "expert_used_count": 8,
    "expert_shared_count": 1,
    "attention.head_count": 64,
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 256,
    "attention.value_length_mla": 256,
    "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048,
}
_U16, _I32, _U32, _STRING, _ARRAY = 2, 5, 4, 8, 9


def write(folder: Path, manifest: Manifest, **changes: int) -> Path:
    """Writes the set under the manifest's names and returns the first one's path. ``changes`` are to METADATA, with
    underscores for dots."""
    n_files, n_tensors = len(manifest.files), len(manifest.tensors)
    for index, file in enumerate(manifest.files):
        tensors = [tensor for tensor in manifest.tensors if tensor.file == index]
        split = [
            _pair("split.no", _U16, pack("<H", index)),
            _pair("split.count", _U16, pack("<H", n_files)),
            _pair("split.tensors.count", _I32, pack("<i", n_tensors)),
        ]
        pairs = [*split, *_model(changes)] if index == 0 else split
        header = _header(pairs, tensors, file.header_bytes)
        with (folder / file.name).open("wb") as stream:
            stream.write(header)
            stream.truncate(file.size_bytes)
    return folder / manifest.files[0].name


def keep_digests(folder: Path, manifest: Manifest) -> None:
    """As if every file had been hashed, with the manifest's digest as the result."""
    for file in manifest.files:
        status = (folder / file.name).stat()
        kept = {
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "ctime_ns": status.st_ctime_ns,
            "inode": status.st_ino,
            "sha256": file.sha256,
        }
        (folder / f"{file.name}.sha256.json").write_text(json.dumps(kept))


def _header(pairs: Sequence[bytes], tensors: Sequence[TensorEntry], size: int) -> bytes:
    """The bytes up to the first tensor's; ``ValueError`` when they don't end within the last 32 of ``size``."""
    infos = (
        _text(tensor.name.encode())
        + pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        + pack("<IQ", gguf.GGMLQuantizationType[tensor.type], tensor.offset - size)
        for tensor in tensors
    )
    header = pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs)) + b"".join((*pairs, *infos))
    if tensors and not size - 32 < len(header) <= size:
        raise ValueError(f"a header of {len(header)} bytes, not {size}")
    return header.ljust(size, b"\0")


def _model(changes: dict[str, int]) -> list[bytes]:
    given = {key: changes.get(key.replace(".", "_"), value) for key, value in METADATA.items()}
    tokens = [STOPS.get(number, f"<{number}>").encode() for number in range(154_880)]
    return [
        _pair("general.architecture", _STRING, _text(b"glm-dsa")),
        *(_pair(f"glm-dsa.{key}", _U32, pack("<I", value)) for key, value in given.items()),
        _pair("tokenizer.ggml.tokens", _ARRAY, pack("<IQ", _STRING, len(tokens)) + b"".join(map(_text, tokens))),
        _pair("tokenizer.ggml.eos_token_id", _U32, pack("<I", 154_820)),
        _pair("tokenizer.ggml.eot_token_id", _U32, pack("<I", 154_827)),
        _pair("tokenizer.ggml.eom_token_id", _U32, pack("<I", 154_829)),
    ]


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return _text(key.encode()) + pack("<I", kind) + value


def _text(text: bytes) -> bytes:
    return pack("<Q", len(text)) + text

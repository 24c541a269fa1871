"""Header bytes of a GGUF: all a client needs of a model, for its tokenizer and chat template."""

from __future__ import annotations

import hashlib
from pathlib import Path
from struct import pack

from swarm.artifact.gguf_file import MAGIC, SPLIT_PREFIX, VERSIONS, parse_header, read_file
from swarm.artifact.manifest import Manifest
from swarm.errors import ArtifactMismatch


def header_bytes(path: Path) -> bytes:
    """One file's bytes from 0 to the first byte of tensor data."""
    return read_file(path).header.raw


def check_header(data: bytes, manifest: Manifest) -> None:
    """Raises ``ArtifactMismatch`` unless ``data`` are the header bytes of the first file, the one with the metadata."""
    if len(data) != manifest.files[0].header_bytes or hashlib.sha256(data).hexdigest() != manifest.header_sha256:
        raise ArtifactMismatch(f"a peer served other header bytes than those of {manifest.name}; ask another peer")


def vocabulary_gguf(header: bytes) -> bytes:
    """A GGUF of its own with the metadata and no tensors, which llama.cpp opens for its vocabulary. The split keys go,
    else it would look for the other files."""
    parsed = parse_header(header, "header")
    kept = [header[pair.start : pair.end] for pair in parsed.pairs if not pair.key.startswith(SPLIT_PREFIX)]
    return b"".join([pack("<4sIQQ", MAGIC, max(VERSIONS), 0, len(kept)), *kept])

"""The layout twin with something to tell apart: every tensor of some layers begins and ends with bytes of its own."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from bench.glm_layout import pinned_layout, write_twin
from bench.glm_metadata import GlmShape
from swarm.artifact.catalog import GLM52
from swarm.artifact.gguf_file import read_header
from swarm.artifact.manifest import FileEntry, Manifest, TensorEntry

NAME = "glm-layout-twin"


def marked_twin(folder: Path, layers: tuple[int, int]) -> Manifest:
    """Writes it; returns its manifest, in which the digests of files with weights are not their own: hashing 200 GiB of
    holes takes minutes, and no part of a file is compared with them."""
    paths = write_twin(folder, pinned_layout(), GlmShape())
    pinned = GLM52.manifest
    header = read_header(paths[0]).header
    manifest = replace(pinned, name=NAME, header_sha256=hashlib.sha256(header.raw).hexdigest())
    manifest = replace(manifest, files=tuple(_own_digest(manifest, number, path) for number, path in enumerate(paths)))
    manifest = manifest.with_file_names([path.name for path in paths])
    for tensor in manifest.span_tensors(*layers):
        with paths[tensor.file].open("r+b") as stream:
            for at in (tensor.offset, tensor.offset + tensor.bytes - len(mark(tensor))):
                stream.seek(at)
                stream.write(mark(tensor))
    return manifest


def _own_digest(manifest: Manifest, number: int, path: Path) -> FileEntry:
    """Of a file that is a header and nothing else, which every fetch makes whole."""
    entry = manifest.files[number]
    if any(tensor.file == number for tensor in manifest.tensors):
        return entry
    return replace(entry, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def mark(tensor: TensorEntry) -> bytes:
    return hashlib.sha256(tensor.name.encode()).digest()

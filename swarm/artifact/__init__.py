"""Artifacts: pinned GGUF models, where they may be cut, and what their parts weigh."""

from swarm.artifact.cuts import check_range, check_span, legal_cuts, parse_layers
from swarm.artifact.header import check_header, header_bytes, vocabulary_gguf
from swarm.artifact.manifest import FileEntry, Manifest, TensorEntry, load_manifest
from swarm.artifact.memory import SpanMemory, available_memory, describe, estimate

__all__ = [
    "FileEntry",
    "Manifest",
    "SpanMemory",
    "TensorEntry",
    "available_memory",
    "check_header",
    "check_range",
    "check_span",
    "describe",
    "estimate",
    "header_bytes",
    "legal_cuts",
    "load_manifest",
    "parse_layers",
    "vocabulary_gguf",
]

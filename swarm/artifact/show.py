"""An artifact in tables, for ``swarm-artifact inspect``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from swarm.artifact import description
from swarm.artifact.description import Layer, LayerKind
from swarm.artifact.local_path import printable
from swarm.artifact.manifest import Manifest
from swarm.artifact.memory import format_bytes
from swarm.artifact.pinned_model import PinnedModel

PLAIN_COLUMNS = 160  # where the output is no terminal


def model(manifest: Manifest, pinned: PinnedModel | None) -> None:
    """Prints to stdout."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS, highlight=False, markup=False)
    layers = description.layers(manifest)
    console.print(_facts(manifest, pinned, layers))
    console.print()
    console.print(_files(manifest))
    console.print()
    console.print(_layers(manifest, layers))


def _facts(manifest: Manifest, pinned: PinnedModel | None, layers: Sequence[Layer]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    table.add_row("model", f"{printable(manifest.name)} ({manifest.arch})")
    table.add_row("artifact id", manifest.artifact_id)
    if pinned is not None:
        hub = pinned.hub
        table.add_row("hub", f"folder {hub.folder} of {hub.repository} at revision {hub.revision}")
    for name, text in (*_shape(manifest), *_cutting(manifest, layers), *_running(manifest)):
        table.add_row(name, text)
    return table


def _shape(manifest: Manifest) -> Iterator[tuple[str, str]]:
    blocks = {0: "no MTP block", 1: "1 MTP block"}.get(manifest.n_mtp, f"{manifest.n_mtp} MTP blocks")
    yield (
        "layers",
        f"{manifest.n_layers}, and {blocks}; {manifest.n_embd} wide, vocabulary {manifest.n_vocab}, "
        f"trained for {manifest.n_ctx_train} tokens",
    )
    n_files = len(manifest.files)
    weights = format_bytes(manifest.span_bytes(0, manifest.n_layers))
    with_mtp = format_bytes(manifest.span_bytes(0, manifest.n_layers, mtp=True))
    mtp = f", with MTP {with_mtp}" if manifest.n_mtp else ""
    yield (
        "size",
        f"{format_bytes(manifest.size_bytes)} in {n_files} {'file' if n_files == 1 else 'files'}, "
        f"{len(manifest.tensors)} tensors; weights that are used: {weights}{mtp}",
    )


def _cutting(manifest: Manifest, layers: Sequence[Layer]) -> Iterator[tuple[str, str]]:
    yield "legal cuts", "between any two layers" if not manifest.indexer_types else _inner_cuts(manifest)
    if manifest.indexer_types:
        full = [layer for layer, own in enumerate(manifest.indexer_types) if own]
        shared = manifest.n_layers - len(full)
        yield (
            "indexer",
            f"own in {len(full)} layers: {description.ranges(full)}; {shared} layers share the one before them; "
            f"top-k {manifest.top_k}",
        )
    if len(manifest.files) > 1:
        apart = (f"{layer.number} (files {_numbers(layer.files)})" for layer in description.straddling(layers))
        yield "in two files", ", ".join(apart) or "no layer"


def _inner_cuts(manifest: Manifest) -> str:
    return ", ".join(str(cut) for cut in manifest.cuts[1:-1]) or "none"


def _running(manifest: Manifest) -> Iterator[tuple[str, str]]:
    sizes = (
        f"{name} {format_bytes(manifest.kv_bytes_per_token(0, manifest.n_layers, kind))}"
        for name, kind in description.KV_TYPES.items()
    )
    yield "KV cache", f"per token: {', '.join(sizes)}"
    yield "stop tokens", ", ".join(str(token) for token in manifest.stop_tokens) or "none"


def _files(manifest: Manifest) -> Table:
    table = Table("", "file", "bytes", "header", "SHA-256", box=None)
    for index in (0, 2, 3):
        table.columns[index].justify = "right"
    table.columns[4].overflow = "fold"
    for number, file in enumerate(manifest.files, 1):
        table.add_row(str(number), printable(file.name), f"{file.size_bytes:,}", f"{file.header_bytes:,}", file.sha256)
    return table


def _layers(manifest: Manifest, layers: Sequence[Layer]) -> Table:
    table = Table("layers", "kind", "indexer", "bytes each", "of which used", "types", box=None)
    table.columns[0].overflow = table.columns[5].overflow = "fold"
    table.columns[3].justify = table.columns[4].justify = "right"
    for tensor in description.outside_layers(manifest):
        table.add_row(tensor.name, "", "", f"{tensor.bytes:,}", f"{tensor.bytes:,}", tensor.type)
    for kind, numbers in description.grouped(layers):
        table.add_row(
            description.ranges(numbers),
            kind.role,
            kind.indexer,
            f"{kind.file_bytes:,}",
            f"{kind.needed_bytes:,}",
            _types(kind),
        )
    return table


def _types(kind: LayerKind) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in kind.types)


def _numbers(files: Sequence[int]) -> str:
    return " and ".join(str(file + 1) for file in files)

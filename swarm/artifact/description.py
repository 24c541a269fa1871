"""What there is to say about an artifact, as values: layer by layer, and layers that are alike together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from shim.types import KvType
from swarm.artifact.facts import ModelFacts
from swarm.artifact.manifest import Manifest, TensorEntry, layer_of

if TYPE_CHECKING:
    from swarm.artifact.pinned_model import PinnedModel

KV_TYPES = {kind.name.lower(): kind for kind in KvType}
_EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.")


@dataclass(frozen=True)
class LayerKind:
    """What layers have in common that are listed together."""

    role: str  # dense, experts or MTP
    indexer: str  # own, shared, or empty without one
    file_bytes: int
    needed_bytes: int  # what a graph reads of them
    types: tuple[tuple[str, int], ...]  # element type and its bytes, the largest first


@dataclass(frozen=True)
class Layer:
    number: int
    kind: LayerKind
    files: tuple[int, ...]  # that hold a part of it


def layers(manifest: Manifest) -> tuple[Layer, ...]:
    """All layers, MTP blocks at the end."""
    groups: dict[int, list[TensorEntry]] = {}
    for tensor in manifest.tensors:
        number = layer_of(tensor.name)
        if number is not None:
            groups.setdefault(number, []).append(tensor)
    return tuple(_layer(manifest, number, groups.get(number, ())) for number in range(len(manifest.layer_bytes)))


def _layer(manifest: Manifest, number: int, tensors: Sequence[TensorEntry]) -> Layer:
    is_mtp = number >= manifest.n_layers
    experts = any(_EXPERTS.search(tensor.name) for tensor in tensors)
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.type] += tensor.bytes
    kind = LayerKind(
        role="MTP" if is_mtp else "experts" if experts else "dense",
        indexer="" if is_mtp or not manifest.indexer_types else "own" if manifest.indexer_types[number] else "shared",
        file_bytes=sizes.total(),
        needed_bytes=manifest.layer_bytes[number],
        types=tuple(sizes.most_common()),
    )
    return Layer(number, kind, tuple(sorted({tensor.file for tensor in tensors})))


def grouped(all_layers: Iterable[Layer]) -> tuple[tuple[LayerKind, tuple[int, ...]], ...]:
    """Each kind of layer with the numbers of its layers, in the order of its first."""
    groups: dict[LayerKind, list[int]] = {}
    for layer in all_layers:
        groups.setdefault(layer.kind, []).append(layer.number)
    return tuple((kind, tuple(numbers)) for kind, numbers in groups.items())


def straddling(all_layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Layers whose tensors lie in more than one file."""
    return tuple(layer for layer in all_layers if len(layer.files) > 1)


def outside_layers(manifest: Manifest) -> tuple[TensorEntry, ...]:
    """Embedding, output, and what every layer shares."""
    return tuple(tensor for tensor in manifest.tensors if layer_of(tensor.name) is None)


def ranges(numbers: Iterable[int]) -> str:
    """``3-5, 7, 9-10``"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def document(manifest: Manifest, pinned: PinnedModel | None) -> dict[str, object]:
    """Everything ``swarm-artifact inspect --json`` writes."""
    all_layers = layers(manifest)
    n_layers = manifest.n_layers
    return {
        "name": manifest.name,
        "artifact_id": manifest.artifact_id,
        "hub": None if pinned is None else asdict(pinned.hub),
        "size_bytes": manifest.size_bytes,
        "header_sha256": manifest.header_sha256,
        "files": [asdict(file) for file in manifest.files],
        "n_tensors": len(manifest.tensors),
        "model": {part.name: getattr(manifest, part.name) for part in fields(ModelFacts)},
        "cuts": manifest.cuts,
        "layers": [
            {"layer": layer.number, **asdict(layer.kind), "types": dict(layer.kind.types), "files": layer.files}
            for layer in all_layers
        ],
        "outside_layers": [asdict(tensor) for tensor in outside_layers(manifest)],
        "straddling": [layer.number for layer in straddling(all_layers)],
        "weights_bytes": manifest.span_bytes(0, n_layers),
        "weights_bytes_with_mtp": manifest.span_bytes(0, n_layers, mtp=True),
        "kv_bytes_per_token": {name: manifest.kv_bytes_per_token(0, n_layers, kind) for name, kind in KV_TYPES.items()},
    }

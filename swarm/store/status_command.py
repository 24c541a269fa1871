"""``swarm-artifact status``: which parts of a model are on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.artifact.memory import format_bytes
from swarm.store.gc_command import add_stored, say

if TYPE_CHECKING:
    from swarm.store.partial_copy import PartialCopy

NAME = "status"
HELP = "show which parts of a model are on this machine"


def add(parser: argparse.ArgumentParser) -> None:
    add_stored(parser)


def run(given: argparse.Namespace) -> int:
    from swarm.store.find import find_stored
    from swarm.store.partial_copy import PartialCopy

    stored = find_stored(given.what, given.data_dir, given.manifest)
    with PartialCopy.look(stored.folder, stored.manifest) as copy:
        files = range(copy.table.n_files)
        held = sum(copy.held_bytes(copy.table.of_file(file)) for file in files)
        name, size = stored.manifest.name, stored.manifest.size_bytes
        say(f"{name} in {stored.folder}: {format_bytes(held)} of {format_bytes(size)} are here")
        for file in files:
            say(f"{file + 1}/{len(files)} {copy.path(file).name}: {_part(copy, file)}")
        layers = complete_layers(copy)
        say(f"layers that are complete: {_ranges(layers) if layers else 'none'}")
        for remark in copy.remarks:
            say(remark)
    return 0


def complete_layers(copy: PartialCopy) -> tuple[int, ...]:
    """With what the first and the last one own besides."""
    layers = range(copy.manifest.n_layers)
    return tuple(layer for layer in layers if not copy.missing(copy.table.of_span(layer, layer + 1)))


def _part(copy: PartialCopy, file: int) -> str:
    if file in copy.unknown:
        return "lies there, but was not put there by this program"
    pieces = copy.table.of_file(file)
    held = copy.held_bytes(pieces)
    linked = ", linked with another file" if copy.is_linked(file) else ""
    left = copy.taken_bytes(copy.missing(pieces))
    freed = f", and {format_bytes(left)} that gc would free" if left and not linked else ""
    if not held:
        return f"nothing{linked}{freed}"
    if copy.whole(file):
        return f"all of it{linked}"
    size = format_bytes(copy.manifest.files[file].size_bytes)
    return f"{format_bytes(held)} of {size}{linked}{freed}"


def _ranges(layers: Sequence[int]) -> str:
    starts = [layer for layer in layers if layer - 1 not in layers]
    stops = [layer + 1 for layer in layers if layer + 1 not in layers]
    return ", ".join(f"{start}:{stop}" for start, stop in zip(starts, stops, strict=True))

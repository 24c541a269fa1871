"""``swarm-artifact gc``: gives back the room of a model's parts that are not needed any more."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.artifact.catalog import NAMES
from swarm.artifact.cuts import AUTO, check_span, parse_layers
from swarm.artifact.local_path import printable
from swarm.artifact.manifest import Manifest
from swarm.artifact.memory import format_bytes
from swarm.errors import UsageError

if TYPE_CHECKING:
    from swarm.store.partial_copy import PartialCopy

NAME = "gc"
HELP = "free the room of parts that are not needed any more"


def add(parser: argparse.ArgumentParser) -> None:
    add_stored(parser)
    parser.add_argument(
        "--keep",
        metavar="A:B",
        action="append",
        required=True,
        help="layers to keep, from A up to but without B; may be given several times",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be freed")


def add_stored(parser: argparse.ArgumentParser) -> None:
    """The options of ``find_stored``."""
    parser.add_argument("what", metavar="NAME|DIR", help=f"{', '.join(NAMES)}, or the folder with a model's parts")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where the parts are (default: in the user's data)"
    )
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="of a model that has no name here")


def run(given: argparse.Namespace) -> int:
    from swarm.store.find import find_stored
    from swarm.store.partial_copy import PartialCopy

    stored = find_stored(given.what, given.data_dir, given.manifest)
    spans = [_span(stored.manifest, text) for text in given.keep]
    open_copy = PartialCopy.look if given.dry_run else PartialCopy.open_existing
    with open_copy(stored.folder, stored.manifest) as copy:
        keep = {piece for first, last in spans for piece in copy.table.of_span(first, last, mtp=True)}
        rest = [piece for file in _own_files(copy) for piece in copy.table.of_file(file) if piece not in keep]
        kept = ", ".join(f"{first}:{last}" for first, last in spans)
        is_said = "would be" if given.dry_run else "are"
        say(
            f"{stored.manifest.name} in {stored.folder}: layers {kept} are kept, {format_bytes(copy.held_bytes(keep))} "
            f"of them are here; {format_bytes(copy.taken_bytes(rest))} of everything else {is_said} freed"
        )
        if not given.dry_run:
            say(f"{format_bytes(copy.free(rest))} freed")
    return 0


def _own_files(copy: PartialCopy) -> Iterator[int]:
    """Says which ones are left alone."""
    for file in range(copy.table.n_files):
        if file in copy.unknown:
            say(f"{copy.path(file).name}: not put there by this program, left as it is")
        elif copy.is_linked(file):
            say(f"{copy.path(file).name}: linked with another file, frees nothing, left as it is")
        else:
            yield file


def _span(manifest: Manifest, text: str) -> tuple[int, int]:
    span = None if text.strip().lower() == AUTO else parse_layers(text, "--keep", "")
    if span is None:
        raise UsageError(f"--keep {text}: not layers; write for example --keep 0:{manifest.cuts[1]}")
    check_span(manifest, *span)
    return span


def say(line: str) -> None:
    print(printable(line), flush=True)

"""``swarm-artifact fetch``: gets the parts of a model that some layers need."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.artifact.catalog import NAMES, PINNED, named
from swarm.artifact.cuts import check_span, parse_layers
from swarm.artifact.local_path import printable
from swarm.artifact.manifest import Manifest
from swarm.artifact.memory import format_bytes
from swarm.artifact.progress import duration, hashing, reading
from swarm.artifact.sizes import parse_size
from swarm.errors import UsageError
from swarm.store.find import given_manifest
from swarm.store.lists import find_digests, tensor_check
from swarm.store.place import default_folder
from swarm.store.say import say
from swarm.store.source_text import HUB

if TYPE_CHECKING:
    from swarm.store.fetch import Fetched
    from swarm.store.partial_copy import PartialCopy
    from swarm.store.pieces import Piece
    from swarm.store.sources import Source

NAME = "fetch"
HELP = "get the parts of a model that some layers need, or go on with that"
INTERRUPTED = 130
ALL = "all"
_MAX_PARALLEL = 16


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="another model, from inspect --manifest-out")
    parser.add_argument("--layers", required=True, metavar=f"A:B|{ALL}", help="layers A to B-1, or every byte")
    parser.add_argument("--mtp", action="store_true", help="the model's MTP block too; for layers up to the last one")
    parser.add_argument(
        "--source", metavar="hub|URL|DIR", help="where it comes from: the model's own hub, a server, or a folder"
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where it goes (default: in the user's data)")
    parser.add_argument("--limit", metavar="SIZE", help="bytes a second, for example 10MiB")
    parser.add_argument("--disk-reserve", default="2GiB", metavar="SIZE", help="left free there (default: %(default)s)")
    parser.add_argument(
        "--parallel", type=int, default=4, metavar="N", help="requests at a time (default: %(default)s)"
    )


@dataclass(frozen=True)
class _Plan:
    """``layers`` is None for every byte of the model."""

    manifest: Manifest
    layers: tuple[int, int] | None
    mtp: bool
    source: str
    folder: Path
    bytes_per_second: int | None
    disk_reserve_bytes: int
    parallel: int
    digests: Mapping[str, str] | None

    @property
    def what(self) -> str:
        if self.layers is None:
            return f"all of {self.manifest.name}"
        return f"layers {self.layers[0]}:{self.layers[1]} of {self.manifest.name}"


def run(given: argparse.Namespace) -> int:
    plan = _plan(given)
    from swarm.store.partial_copy import PartialCopy
    from swarm.store.sources import open_source

    source = open_source(plan.source, plan.manifest)
    with PartialCopy.open(plan.folder, plan.manifest, disk_reserve_bytes=plan.disk_reserve_bytes) as copy:
        for remark in copy.remarks:
            say(remark)
        _adopt(copy)
        pieces = _pieces(plan, copy)
        say(_before(plan, copy, pieces))
        try:
            fetched = asyncio.run(_fetch(plan, source, copy, pieces))
        except KeyboardInterrupt:
            held, total = copy.held_bytes(pieces), sum(piece.bytes for piece in pieces)
            _complain(
                f"interrupted; {format_bytes(held)} of {format_bytes(total)} are kept in {plan.folder}, the same "
                "command goes on from there"
            )
            return INTERRUPTED
        say(_after(plan, fetched))
    return 0


def _plan(given: argparse.Namespace) -> _Plan:
    manifest, name = _manifest(given.model, given.manifest)
    layers = _layers(given.layers, manifest)
    source = given.source or (HUB if manifest.name in PINNED else None)
    if source is None:
        raise UsageError(f"{name}: say where it comes from, with --source URL or --source DIR")
    if not 1 <= given.parallel <= _MAX_PARALLEL:
        raise UsageError(f"--parallel {given.parallel}: choose 1 to {_MAX_PARALLEL}")
    return _Plan(
        manifest,
        layers,
        _mtp(given, manifest),
        source,
        (given.data_dir or default_folder(name)).absolute(),
        None if given.limit is None else parse_size(given.limit, "--limit", "10MiB"),
        parse_size(given.disk_reserve, "--disk-reserve", "2GiB", zero=True),
        given.parallel,
        find_digests(manifest, given.manifest),
    )


def _manifest(model: str | None, path: Path | None) -> tuple[Manifest, str]:
    """With the files' names, and the name of the folder for them."""
    if (model is None) == (path is None):
        raise UsageError(f"name one model: {', '.join(NAMES)}, or its manifest with --manifest FILE")
    if path is not None:
        return given_manifest(path), path.stem
    known = named(model or "")
    if known is None:
        raise UsageError(f"no model of the name {model}; choose one of {', '.join(NAMES)}, or give --manifest FILE")
    return known.manifest, known.name


def _layers(text: str, manifest: Manifest) -> tuple[int, int] | None:
    if text.strip().lower() == ALL:
        return None
    layers = parse_layers(text, other=ALL)
    if layers is None:
        raise UsageError(
            f"--layers {text}: a node chooses for itself; write for example --layers 0:{manifest.cuts[-1]}"
        )
    check_span(manifest, *layers)
    return layers


def _mtp(given: argparse.Namespace, manifest: Manifest) -> bool:
    if given.mtp and not manifest.n_mtp:
        raise UsageError(f"--mtp: {manifest.name} has no MTP block; leave --mtp out")
    return bool(given.mtp)


def _pieces(plan: _Plan, copy: PartialCopy) -> tuple[Piece, ...]:
    if plan.layers is not None:
        return copy.table.of_span(*plan.layers, plan.mtp)
    rest = (piece for file in range(copy.table.n_files) for piece in copy.table.of_file(file))
    headers = copy.table.headers()
    known = {*headers}
    return (*headers, *(piece for piece in rest if piece not in known))


def _adopt(copy: PartialCopy) -> None:
    """Files that the user has put there: right ones need not be fetched."""
    for file in copy.unknown:
        done, total = 0, copy.manifest.files[file].size_bytes
        with hashing(printable(copy.path(file).name)) as shown:

            def on_bytes(n_bytes: int) -> None:
                nonlocal done
                done += n_bytes
                shown(done, total)  # noqa: B023  # called before the next file

            copy.adopt_whole(file, on_bytes)
        say(f"{copy.path(file).name}: was there already, and is right")


async def _fetch(plan: _Plan, source: Source, copy: PartialCopy, pieces: tuple[Piece, ...]) -> Fetched:
    from swarm.store.fetch import fetch

    missing = sum(piece.bytes for piece in copy.missing(pieces))
    before = 0
    with reading(missing, "fetching") as shown:
        shown.file(plan.manifest.name)

        def on_progress(done: int, _total: int) -> None:
            nonlocal before
            shown.bytes(done - before)
            before = done

        try:
            return await fetch(
                copy,
                source,
                pieces,
                limit_bytes_per_second=plan.bytes_per_second,
                parallel=plan.parallel,
                on_progress=on_progress,
                on_tensor=tensor_check(copy, plan.digests),
            )
        finally:
            await source.close()


def _before(plan: _Plan, copy: PartialCopy, pieces: tuple[Piece, ...]) -> str:
    total = sum(piece.bytes for piece in pieces)
    here = copy.held_bytes(pieces)
    whole = format_bytes(plan.manifest.size_bytes)
    return (
        f"{plan.what}: {format_bytes(total)} of {whole}, {format_bytes(here)} are here already, "
        f"{format_bytes(total - here)} to fetch into {plan.folder}"
    )


def _after(plan: _Plan, fetched: Fetched) -> str:
    if not fetched.requests:
        return f"{plan.what}: all here"
    rate = format_bytes(int(fetched.bytes / max(fetched.seconds, 1e-3)))
    again = f", {fetched.retries} times after a failure" if fetched.retries else ""
    return (
        f"{plan.what}: all here; {format_bytes(fetched.bytes)} came in {duration(fetched.seconds)}, {rate}/s, by "
        f"{fetched.requests} requests{again}"
    )


def _complain(line: str) -> None:
    print(f"swarm-artifact: {printable(line)}", file=sys.stderr, flush=True)

"""Which model a node serves, and whether its files are here or its parts are fetched: from what the operator named.

A model by path is a file that is here. A pinned model by name is here when a folder of its files is named, else its
parts are fetched, from the hub unless another source is named. A small model that comes with the program is fetched
only from a named source. A manifest of one's own always needs a source.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm.artifact import catalog
from swarm.artifact.manifest import Manifest
from swarm.errors import UsageError
from swarm.node.config import StoreOptions
from swarm.store.find import given_manifest
from swarm.store.lists import find_digests
from swarm.store.place import default_folder
from swarm.store.source_text import HUB, checked_source


@dataclass(frozen=True)
class Wanted:
    """What the operator named. ``source`` is the option's text. With a ``manifest``, ``model`` does not count."""

    model: str
    model_dir: Path | None = None
    manifest: Path | None = None
    source: str | None = None
    data_dir: Path | None = None
    bytes_per_second: int | None = None
    disk_reserve_bytes: int = StoreOptions.disk_reserve_bytes


@dataclass(frozen=True)
class Found:
    """``path`` is the model's first file: it is here, or ``store`` says how its parts get there."""

    path: Path
    name: str
    store: StoreOptions | None = None


def choose_model(wanted: Wanted) -> Found:
    """Raises ``UsageError`` for options that don't go together, ``NotAModel`` for files that are not there."""
    if wanted.source is not None and wanted.model_dir is not None:
        raise UsageError("--model-dir and --source exclude each other: files are here or are fetched; leave one out")
    source = None if wanted.source is None else checked_source(wanted.source)
    if wanted.manifest is not None:
        return _by_manifest(wanted, wanted.manifest, source)
    pinned = catalog.PINNED.get(wanted.model.lower())
    if pinned is not None and wanted.model_dir is None:
        return _fetched(wanted, pinned.name, pinned.manifest, source or HUB)
    if source is not None:
        known = catalog.KNOWN.get(wanted.model.lower())
        if known is None:
            catalog.find_model(wanted.model, None, {})  # a name that is none says so
            raise UsageError(
                f"--source {source}: {wanted.model} is a file of this machine; leave it out, or name what to fetch "
                f"with --model {'|'.join(catalog.NAMES)} or --manifest FILE"
            )
        if source == HUB:
            raise UsageError(f"--source {HUB}: {known.name} is not there; leave it out, it comes with this program")
        return _fetched(wanted, known.name, known.manifest, source)
    local = catalog.find_model(wanted.model, wanted.model_dir, {})
    return Found(local.path, local.name)


def _by_manifest(wanted: Wanted, path: Path, source: str | None) -> Found:
    if wanted.model_dir is not None:
        raise UsageError("--manifest describes what is fetched; leave --model-dir out, or serve the files by --model")
    if source is None or source == HUB:
        raise UsageError(f"--manifest {path}: say where its files are with --source URL or --source DIR")
    return _fetched(wanted, path.stem, given_manifest(path), source, path)


def _fetched(wanted: Wanted, name: str, manifest: Manifest, source: str, path: Path | None = None) -> Found:
    """``path`` is the manifest's, where it comes from a file."""
    folder = (wanted.data_dir or default_folder(name)).absolute()
    digests = find_digests(manifest, path)
    store = StoreOptions(manifest, folder, source, wanted.bytes_per_second, wanted.disk_reserve_bytes, digests)
    return Found(folder / manifest.files[0].name, name, store)

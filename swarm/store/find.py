"""Which model a command of the store is about, and in which folder its parts are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm.artifact.catalog import NAMES, every, named
from swarm.artifact.gguf_set import shard_name
from swarm.artifact.local_path import is_folder, user_path
from swarm.artifact.manifest import Manifest
from swarm.artifact.verify import read_manifest
from swarm.errors import UsageError
from swarm.store.piece_state import SUFFIX
from swarm.store.place import default_folder


@dataclass(frozen=True)
class Stored:
    """``manifest`` has the files' names. The folder need not be there."""

    manifest: Manifest
    folder: Path


def find_stored(what: str, data_dir: Path | None = None, manifest_path: Path | None = None) -> Stored:
    """``what`` is a model's name, or a folder with parts of one; ``manifest_path`` describes a model that is not in the
    catalog, whose files are named after it. Raises ``UsageError``."""
    known = named(what)
    if known is not None and manifest_path is None:
        return Stored(known.manifest, data_dir or default_folder(known.name))
    if manifest_path is not None and data_dir is None and not is_folder(user_path(what)):
        return Stored(given_manifest(manifest_path), default_folder(manifest_path.stem))
    folder = data_dir or user_path(what)
    if manifest_path is not None:
        return Stored(given_manifest(manifest_path), folder)
    return Stored(_told_by_files(folder), folder)


def has_parts(folder: Path) -> bool:
    """Whether something was fetched into it."""
    return is_folder(folder) and any(folder.glob(f"*{SUFFIX}"))


def given_manifest(path: Path) -> Manifest:
    manifest = read_manifest(path)
    return manifest.with_file_names(stem_names(path.stem, len(manifest.files)))


def stem_names(stem: str, n_files: int) -> tuple[str, ...]:
    """Of the files of a model that is known by its manifest alone."""
    if n_files == 1:
        return (f"{stem}.gguf",)
    return tuple(shard_name(stem, number, n_files) for number in range(1, n_files + 1))


def _told_by_files(folder: Path) -> Manifest:
    if not is_folder(folder):
        raise UsageError(f"{folder}: no such folder, and no model's name; choose a folder or one of {', '.join(NAMES)}")
    present = {path.name.removesuffix(SUFFIX) for path in folder.iterdir()}
    for known in every():
        if present.intersection(known.file_names):
            return known.manifest
    raise UsageError(
        f"{folder}: no parts of a known model in it; name the model's manifest with --manifest FILE, or another folder"
    )

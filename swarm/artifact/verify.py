"""Which files are to be checked, and what they should be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from swarm.artifact import catalog
from swarm.artifact.catalog import NAMES, Named, every
from swarm.artifact.gguf_file import read_header
from swarm.artifact.gguf_set import set_names
from swarm.artifact.local_copy import is_copy
from swarm.artifact.local_path import is_folder, user_path
from swarm.artifact.manifest import MAX_DOCUMENT_BYTES, MAX_NAME, Manifest
from swarm.artifact.small_file import read_small
from swarm.errors import ArtifactError, ArtifactMismatch, UsageError

_BY_HAND = "name the model with --model NAME, or its manifest with --manifest FILE"
_WRITE_ONE = "write one with: swarm-artifact inspect MODEL --manifest-out FILE"


@dataclass(frozen=True)
class Target:
    """Files to check. ``manifest`` has their names in ``folder``."""

    manifest: Manifest
    folder: Path

    @property
    def others(self) -> tuple[str, ...]:
        """Further models' files in the folder, which are not looked at."""
        own = {file.name for file in self.manifest.files}
        return tuple(sorted(path.name for path in self.folder.glob("*.gguf") if path.name not in own))


def find_target(what: str, model: str | None = None, manifest: Path | None = None) -> Target:
    """What ``swarm-artifact verify WHAT`` is about: a name, a folder or a file. Raises ``UsageError`` when it can't be
    told which model that should be, and ``NotAModel`` for files that are missing."""
    if manifest is not None and model is not None:
        raise UsageError("--model and --manifest exclude each other; leave one of them out")
    if manifest is None and model is None and what.lower() in NAMES:
        own = _named(what)
        return Target(own.manifest, own.locate(own.verify_folder(os.environ)).parent)
    named = None if model is None else _named(model)
    given = None if manifest is None else read_manifest(manifest)
    path = user_path(what)
    return _in_folder(path, named, given) if is_folder(path) else _of_file(path, named, given)


def read_manifest(path: Path) -> Manifest:
    """A manifest that ``inspect --manifest-out`` wrote."""
    try:
        return Manifest.from_json(read_small(path, MAX_DOCUMENT_BYTES), name=path.stem[:MAX_NAME])
    except OSError as error:
        raise UsageError(f"--manifest {path}: can't be read ({error.strerror}); {_WRITE_ONE}") from error
    except ArtifactError as error:
        raise UsageError(f"--manifest {path}: not a manifest of this program's; {_WRITE_ONE}") from error


def _named(name: str) -> Named:
    found = catalog.named(name)
    if found is None:
        raise UsageError(f"{name}: no manifest is known by that name; choose one of: {', '.join(NAMES)}")
    return found


def _in_folder(folder: Path, named: Named | None, given: Manifest | None) -> Target:
    if given is not None:
        return Target(given.with_file_names(_only_set(folder, len(given.files))), folder)
    found = named or next((each for each in every() if each.any_in(folder)), None)
    if found is None:
        raise UsageError(f"{folder}: none of its files has the name of a known model's; {_BY_HAND}")
    return Target(found.manifest, found.locate(folder).parent)


def _only_set(folder: Path, n_files: int) -> tuple[str, ...]:
    sets = {set_names(path.name) for path in folder.glob("*.gguf")}
    fitting = [names for names in sets if len(names) == n_files]
    if len(fitting) != 1:
        kind = "model" if n_files == 1 else f"model of {n_files} files"
        found = f"more than one {kind}" if fitting else f"no {kind}"
        raise UsageError(f"{folder}: {found} in it; name the file to check, of a split set any of its files")
    return fitting[0]


def _of_file(path: Path, named: Named | None, given: Manifest | None) -> Target:
    by_name = next((each for each in every() if path.name in each.file_names), None)
    if by_name is not None and given is None and named in (None, by_name):
        return _in_folder(path.parent, by_name, None)
    names = set_names(path.name)
    manifest = given or (named.manifest if named else _by_header(path.with_name(names[0]), len(names)))
    if len(names) != len(manifest.files):
        raise ArtifactMismatch(
            f"{path}: by its name one of {len(names)} files, where {manifest.name} has {len(manifest.files)}; "
            "download that model, or give the files their original names back"
        )
    return Target(manifest.with_file_names(names), path.parent)


def _by_header(first: Path, n_files: int) -> Manifest:
    header = read_header(first)
    found = next((each for each in every() if each.n_files == n_files and is_copy(header, each.manifest)), None)
    if found is None:
        raise UsageError(f"{first}: no model that is known by name; {_BY_HAND}")
    return found.manifest

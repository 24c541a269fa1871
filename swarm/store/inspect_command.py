"""``swarm-artifact inspect``: layers, types, bytes, legal cuts and files of a model."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from swarm.artifact.catalog import NAMES, PINNED, LocalModel, find_model, open_model
from swarm.artifact.local_copy import LocalCopy
from swarm.artifact.local_path import printable
from swarm.artifact.manifest import MAX_DOCUMENT_BYTES, Manifest
from swarm.artifact.progress import hashing
from swarm.artifact.small_file import read_small, replace_file
from swarm.errors import ArtifactError, UsageError
from swarm.store.complete import TO_READ, check_complete

NAME = "inspect"
HELP = "show layers, types, bytes, legal cuts and files of a model"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME|PATH", help=f"{', '.join(NAMES)}, or a GGUF file")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--manifest-out", type=Path, metavar="FILE", help="write the manifest, for verify --manifest")


def run(given: argparse.Namespace) -> int:
    from swarm.artifact import show
    from swarm.artifact.description import document

    manifest = _manifest(given.model)
    pinned = next((pinned for pinned in PINNED.values() if pinned.artifact_id == manifest.artifact_id), None)
    if given.manifest_out is not None:
        _write(given.manifest_out, manifest.to_json())
    if given.json:
        print(json.dumps(document(manifest, pinned)))
    elif given.manifest_out is None:
        show.model(manifest, pinned)
    return 0


def _manifest(text: str) -> Manifest:
    """A pinned model's needs none of its files."""
    pinned = PINNED.get(text.lower())
    if pinned is not None:
        return pinned.manifest
    copy = _open(find_model(text))
    check_complete(copy.paths[0].parent, copy.manifest, TO_READ)
    for remark in copy.remarks:
        print(printable(remark), file=sys.stderr)
    return copy.manifest


def _open(model: LocalModel) -> LocalCopy:
    with hashing(printable(model.path.name)) as progress:
        return open_model(model, progress)


def _write(path: Path, data: bytes) -> None:
    """Replaces nothing but an earlier manifest: the model itself is easily named by mistake."""
    try:
        if os.path.lexists(path) and not _is_manifest(path):
            raise UsageError(f"--manifest-out {path}: is there and no manifest; choose another place")
        replace_file(path, data)
    except OSError as error:
        raise UsageError(f"--manifest-out {path}: can't be written ({error.strerror}); choose another place") from error


def _is_manifest(path: Path) -> bool:
    try:
        data = read_small(path, MAX_DOCUMENT_BYTES)
        if data:  # an empty file loses nothing
            Manifest.from_json(data)
    except (OSError, ArtifactError):
        return False
    return True

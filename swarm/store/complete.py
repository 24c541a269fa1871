"""Whether files that are taken for a whole model's are that, where they were fetched part by part."""

from __future__ import annotations

from pathlib import Path

from swarm.artifact.local_path import exists
from swarm.artifact.manifest import Manifest
from swarm.errors import StoreError
from swarm.store.partial_copy import PartialCopy
from swarm.store.piece_state import SUFFIX, artifact_of

_FETCH = "fetch the rest with: swarm-artifact fetch --layers all"
TO_SERVE = f"to serve those name the model and its folder, with --data-dir instead of --model-dir, or {_FETCH}"
TO_READ = f"this takes every byte; {_FETCH}"


def check_complete(folder: Path, manifest: Manifest, what_next: str = TO_SERVE) -> None:
    """For a program that does not look at pieces: it would take holes for weights. Does nothing where no part was
    fetched. Raises ``StoreError`` where some are missing."""
    only_parts = f"only parts of it were fetched; {what_next}"
    states = [folder / (file.name + SUFFIX) for file in manifest.files]
    present = [state for state in states if exists(state)]
    if not present:
        return
    for state in present:
        if artifact_of(state) not in (None, manifest.artifact_id):  # with its holes read as zeros it is another model
            raise StoreError(f"{state.with_name(state.name.removesuffix(SUFFIX))}: {only_parts}")
    copy = PartialCopy.look(folder, manifest)
    for file in range(copy.table.n_files):
        if file not in copy.unknown and not copy.whole(file):
            raise StoreError(f"{copy.path(file)}: {only_parts}")

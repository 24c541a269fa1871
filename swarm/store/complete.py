"""Whether files that are taken for a whole model's are that, where they were fetched part by part."""

from __future__ import annotations

import os
from pathlib import Path

from swarm.artifact.local_path import exists
from swarm.artifact.manifest import Manifest
from swarm.errors import StoreError
from swarm.store.folder_lock import FolderLock
from swarm.store.partial_copy import PartialCopy
from swarm.store.piece_state import SUFFIX, artifact_of

_FETCH = "fetch the rest with: swarm-artifact fetch --layers all"
TO_SERVE = f"to serve those name the model and its folder, with --data-dir instead of --model-dir, or {_FETCH}"
TO_READ = f"this takes every byte; {_FETCH}"


def check_complete(folder: Path, manifest: Manifest, what_next: str = TO_SERVE) -> None:
    """For a program that does not look at pieces: it would take holes for weights. Does nothing where no part was
    fetched. Raises ``StoreError`` where some are missing."""
    only_parts = f"only parts of it were fetched; {what_next}"
    states = _states(folder, manifest)
    if not states:
        return
    for state in states:
        if artifact_of(state) not in (None, manifest.artifact_id):  # with its holes read as zeros it is another model
            raise StoreError(f"{state.with_name(state.name.removesuffix(SUFFIX))}: {only_parts}")
    copy = PartialCopy.look(folder, manifest)
    for file in range(copy.table.n_files):
        if file not in copy.unknown and not copy.whole(file):
            raise StoreError(f"{copy.path(file)}: {only_parts}")


def hold_complete(folder: Path, manifest: Manifest) -> FolderLock | None:
    """``check_complete``, and what keeps the files complete until it is released: with holes in them a program that has
    them mapped would go on with zeros. None where no part was fetched, or nobody may write. Raises ``StoreError``."""
    lock = None
    if _states(folder, manifest) and os.access(folder, os.W_OK):
        lock = FolderLock(folder, shared=True)
    try:
        check_complete(folder, manifest)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock


def _states(folder: Path, manifest: Manifest) -> list[Path]:
    states = [folder / (file.name + SUFFIX) for file in manifest.files]
    return [state for state in states if exists(state)]

"""Whether files that are taken for a whole model's are that, where they were fetched part by part."""

from __future__ import annotations

from pathlib import Path

from swarm.artifact.local_path import exists
from swarm.artifact.manifest import Manifest
from swarm.errors import StoreError
from swarm.store.partial_copy import PartialCopy
from swarm.store.piece_state import SUFFIX


def check_complete(folder: Path, manifest: Manifest) -> None:
    """For a program that does not look at pieces: it would take holes for weights. Does nothing where no part was
    fetched. Raises ``StoreError`` where some are missing."""
    if not any(exists(folder / (file.name + SUFFIX)) for file in manifest.files):
        return
    copy = PartialCopy.look(folder, manifest)
    for file in range(copy.table.n_files):
        if file not in copy.unknown and not copy.whole(file):
            raise StoreError(
                f"{copy.path(file)}: only parts of it were fetched; to serve those name the folder with --data-dir "
                "instead of --model-dir, or fetch the rest with: swarm-artifact fetch --layers all"
            )

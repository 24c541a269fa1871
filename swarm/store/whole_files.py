"""Files that have become whole: their SHA-256 is known for every model, also where no tensor's digest is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from swarm.artifact.digest import known_digest
from swarm.errors import ArtifactMismatch, SourceError
from swarm.store.in_thread import in_thread
from swarm.store.partial_copy import PartialCopy


async def check_whole_files(copy: PartialCopy, files: Iterable[int], source: str) -> None:
    """Reads those of ``files`` that are whole and that nobody has read since they changed; cancelling stops that.
    Raises ``SourceError`` for wrong bytes, and forgets the file then: which part of it is wrong can't be told."""
    for file in sorted(files):
        if not await in_thread(_is_known, copy, file):
            await _check(copy, file, source)


def _is_known(copy: PartialCopy, file: int) -> bool:
    return not copy.whole(file) or known_digest(copy.path(file)) == copy.manifest.files[file].sha256


async def _check(copy: PartialCopy, file: int, source: str) -> None:
    cancelled = False

    def on_bytes(_n_bytes: int) -> None:
        if cancelled:
            raise InterruptedError

    try:
        await asyncio.to_thread(copy.check_whole, file, on_bytes)
    except ArtifactMismatch as error:
        await in_thread(copy.forget, copy.table.of_file(file))
        raise SourceError(
            f"{source}: {copy.path(file).name} is all here now, and its SHA-256 is not the model's; all of it is to be "
            "fetched again, choose another --source"
        ) from error
    finally:
        cancelled = True  # a thread can only be asked to stop

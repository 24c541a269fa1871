"""Files that lie whole on the same disk already are linked instead of copied: that takes no room and no writing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from swarm.errors import StoreError
from swarm.store.partial_copy import PartialCopy
from swarm.store.pieces import Piece
from swarm.store.sources.folder import FolderSource
from swarm.store.sources.source import Source


def linked_files(copy: PartialCopy, source: Source, missing: Iterable[Piece]) -> frozenset[int]:
    """Numbers of the files, of those with missing pieces, that are now links to the source's own, or were before. Their
    pieces are to be adopted. ``source`` is open."""
    if not isinstance(source, FolderSource):
        return frozenset()
    return frozenset(file for file in {piece.file for piece in missing} if _linked(copy, source, file))


def _linked(copy: PartialCopy, source: FolderSource, file: int) -> bool:
    original, own = source.paths[file], copy.path(file)
    if not source.is_whole(file) or _has_holes(original):
        return False
    if own.exists() and own.samefile(original):
        return file not in copy.unknown
    try:
        copy.link(file, original)
    except (OSError, StoreError):  # another disk, no right to, or parts are here already: copied then
        return False
    return True


def _has_holes(path: Path) -> bool:
    """Of a file with holes nobody can tell what is missing in it. A small one is copied as well as linked."""
    status = path.stat()
    return status.st_blocks * 512 < status.st_size

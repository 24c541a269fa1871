"""Files that are whole: one read gives their SHA-256 and the digests of their tensors, and both are kept.

The note of the tensors is bound to the SHA-256 of the file they were read from, so it is worth something as long as
that one is known to be the file's, and afterwards it still tells which tensor has changed.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm.artifact.digest import compute_digest, file_size, keep_note, known_digest, note_places
from swarm.artifact.digest_list import MAX_LIST_BYTES
from swarm.artifact.local_copy import LocalCopy, check_digest
from swarm.artifact.manifest import Manifest
from swarm.artifact.progress import Reading
from swarm.artifact.small_file import read_small
from swarm.errors import NotAModel
from swarm.store.digests import FileDigester
from swarm.store.disagreements import some_tensors
from swarm.store.pieces import PieceTable

SUFFIX = ".tensors.json"
_HEX = frozenset(string.hexdigits.lower())


@dataclass(frozen=True)
class FileResult:
    """A file with the right bytes, and the digests of its tensors. ``known`` when an earlier run has read them."""

    index: int
    path: Path
    known: bool
    tensors: Mapping[str, str]


def verify_whole(
    copy: LocalCopy, reading: Reading, *, again: bool = False, digests: Mapping[str, str] | None = None
) -> Iterator[FileResult]:
    """Reads the files one by one, those that an earlier run has read only ``again``. Each result is kept at once, so a
    later run goes on where this one ended. Raises ``ArtifactMismatch`` at the first file with wrong bytes, with the
    tensors they are in where ``digests`` or an earlier run can tell."""
    table = PieceTable(copy.manifest)
    for index, (path, entry) in enumerate(zip(copy.paths, copy.manifest.files, strict=True)):
        reading.file(f"file {index + 1} of {len(copy.paths)}")
        kept = _note(path, entry.sha256, _names(copy.manifest, index))
        known = _is_known(copy, index, again=again)
        if not known:
            digester = FileDigester(table.of_file(index))
            digest = compute_digest(path, reading.bytes, digester.update)
            read = digester.tensors()
            check_digest(path, digest, entry.sha256, _where(read, digests or kept or {}))
            _keep(path, digest, read)
            kept = read
        assert kept is not None
        yield FileResult(index, path, known, kept)


def bytes_to_read(copy: LocalCopy, *, again: bool = False) -> int:
    indices = range(len(copy.paths))
    return sum(file_size(copy.paths[index]) for index in indices if not _is_known(copy, index, again=again))


def kept_digests(manifest: Manifest, folder: Path) -> dict[str, str]:
    """Digests of the tensors in those files that are known to be right by SHA-256, whenever they were read."""
    kept: dict[str, str] = {}
    for index, entry in enumerate(manifest.files):
        path = folder / entry.name
        try:
            is_right = known_digest(path) == entry.sha256
        except NotAModel:
            is_right = False
        if is_right:
            kept.update(_note(path, entry.sha256, _names(manifest, index)) or {})
    return kept


def _is_known(copy: LocalCopy, index: int, *, again: bool) -> bool:
    """Whether the file need not be read: both digests of it are kept."""
    path, sha256 = copy.paths[index], copy.manifest.files[index].sha256
    digest = known_digest(path)
    if again or digest is None:
        return False
    check_digest(path, digest, sha256)
    return _note(path, sha256, _names(copy.manifest, index)) is not None


def _names(manifest: Manifest, index: int) -> frozenset[str]:
    return frozenset(tensor.name for tensor in manifest.tensors if tensor.file == index)


def _where(read: Mapping[str, str], right: Mapping[str, str]) -> str:
    """Empty where nobody can tell."""
    changed = [name for name, digest in read.items() if right.get(name, digest) != digest]
    return f" in {some_tensors(changed)}" if changed else ""


def _places(path: Path) -> tuple[Path, Path]:
    return note_places(path, SUFFIX, SUFFIX)


def _keep(path: Path, sha256: str, tensors: Mapping[str, str]) -> None:
    keep_note(_places(path), json.dumps({"sha256": sha256, "tensors": dict(tensors)}).encode())


def _note(path: Path, sha256: str, names: frozenset[str]) -> dict[str, str] | None:
    """What was kept of a file with this SHA-256."""
    for place in _places(path):
        try:
            note = json.loads(read_small(place, MAX_LIST_BYTES))
        except (OSError, ValueError, RecursionError):
            continue  # absent or damaged: the file is read again
        if isinstance(note, dict) and note.get("sha256") == sha256 and _are_digests(note.get("tensors"), names):
            tensors: dict[str, str] = note["tensors"]
            return tensors
    return None


def _are_digests(tensors: object, names: frozenset[str]) -> bool:
    if not isinstance(tensors, dict) or tensors.keys() != names:
        return False
    return all(isinstance(digest, str) and len(digest) == 64 and set(digest) <= _HEX for digest in tensors.values())

"""A model's files: one GGUF, or a split set whose names end in ``-00001-of-00006.gguf`` and the like."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.artifact.gguf_file import AGAIN, MAX_FILES, GgufFile, read_file
from swarm.artifact.local_path import exists
from swarm.artifact.metadata import Metadata
from swarm.errors import NotAModel

_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class GgufSet:
    """All files of an artifact, in order. The first one's metadata describes the model."""

    files: tuple[GgufFile, ...]

    @property
    def metadata(self) -> Metadata:
        return self.files[0].header.metadata


def open_gguf(path: Path) -> GgufSet:
    """Reads the headers of a file, or of the whole split set when ``path`` is any one of its files."""
    opened = read_file(path)
    count = _split_count(opened)
    if count <= 1:
        return GgufSet((opened,))
    files = tuple(opened if shard == path else read_file(shard) for shard in _shard_paths(path, count))
    _check_set(files, count)
    return GgufSet(files)


def _split_count(file: GgufFile) -> int:
    return file.header.metadata.integer("split.count", 1, high=MAX_FILES)


def _shard_paths(path: Path, count: int) -> list[Path]:
    names = set_names(path.name)
    if len(names) != count:
        raise NotAModel(
            f"{path}: one of {count} files, but its name does not end in -00001-of-{count:05d}.gguf or the like; "
            "give the files their original names back"
        )
    shards = [path.with_name(name) for name in names]
    missing = [shard for shard in shards if not exists(shard)]
    if missing:
        raise NotAModel(f"{missing[0]}: missing; the model has {count} files, download the others too")
    return shards


def _check_set(files: Sequence[GgufFile], count: int) -> None:
    names: set[str] = set()
    for index, file in enumerate(files):
        metadata = file.header.metadata
        if _split_count(file) != count or metadata.integer("split.no") != index:
            raise NotAModel(f"{file.path}: not file {index + 1} of {count} of this model; {AGAIN}")
        names.update(tensor.name for tensor in file.header.tensors)
    held = sum(len(file.header.tensors) for file in files)
    claimed = files[0].header.metadata.integer("split.tensors.count", held)
    if len(names) != held or held != claimed:
        first = files[0].path
        raise NotAModel(f"{first}: its {count} files hold {held} tensors, not {claimed} different ones; {AGAIN}")


def set_names(name: str) -> tuple[str, ...]:
    """The names of all files of the set that a file so named is of, in order; its own alone when it is no shard's."""
    match = _SHARD_NAME.fullmatch(name)
    if match is None or not 0 < int(match["number"]) <= int(match["count"]) <= MAX_FILES:
        return (name,)
    prefix, count = match["prefix"], int(match["count"])
    return tuple(shard_name(prefix, number, count) for number in range(1, count + 1))


def shard_name(prefix: str, number: int, count: int) -> str:
    """``number`` counts from 1."""
    return f"{prefix}-{number:05d}-of-{count:05d}.gguf"


def display_name(path: Path) -> str:
    """The file's name without folder, ending and shard number."""
    match = _SHARD_NAME.fullmatch(path.name)
    return match["prefix"] if match else path.name.removesuffix(".gguf")

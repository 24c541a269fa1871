"""Files with holes: written where they were planned, or not at all."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gguf_header import pair, split_pairs
from bench.sparse_set import PlannedFile, digest_set, planned_file, write_set
from swarm.artifact.digest import known_digest
from swarm.artifact.gguf_file import read_file
from swarm.artifact.manifest import TensorEntry
from swarm.errors import ArtifactError, NotAModel, UsageError

HEADER = 256


def plan(folder_size: int = 1 << 20) -> tuple[PlannedFile, tuple[TensorEntry, ...]]:
    tensors = (
        TensorEntry("a.weight", 0, HEADER, 4096, "F32", (1024,)),
        TensorEntry("b.weight", 0, HEADER + 4096, folder_size - HEADER - 4096, "F32", ((folder_size - 4352) // 4,)),
    )
    pairs = [pair("general.architecture", "none"), *split_pairs(0, 1, 2)]
    return planned_file("x.gguf", pairs, tensors, header_bytes=HEADER, size_bytes=folder_size), tensors


def quiet(_what: str, _done: int, _total: int) -> None:
    pass


def test_only_filled_tensors_take_disk(tmp_path: Path) -> None:
    file, tensors = plan(64 << 20)
    (path,) = write_set(tmp_path, [file], tensors[:1], lambda tensor: [b"x" * 4000, b"y" * 96], quiet)
    data = path.read_bytes()
    assert len(data) == 64 << 20
    assert data[:HEADER] == file.header
    assert data[HEADER : HEADER + 4096] == b"x" * 4000 + b"y" * 96
    assert not any(data[HEADER + 4096 :])
    assert path.stat().st_blocks * 512 < 1 << 20
    assert [(t.name, t.offset, t.bytes) for t in read_file(path).header.tensors] == [
        (t.name, t.offset, t.bytes) for t in tensors
    ]


def test_digests_are_of_the_whole_file_and_kept(tmp_path: Path) -> None:
    file, tensors = plan(32 << 20)
    paths = write_set(tmp_path, [file], tensors[:1], lambda tensor: [bytes(4095), b"z"], quiet)
    seen: list[tuple[int, int]] = []
    digests = digest_set(paths, lambda _what, done, total: seen.append((done, total)))
    assert digests == (hashlib.sha256(paths[0].read_bytes()).hexdigest(),)
    assert seen[-1] == (32 << 20, 32 << 20)
    assert known_digest(paths[0]) == digests[0]


def test_interrupted_writing_leaves_nothing(tmp_path: Path) -> None:
    file, tensors = plan()

    def source(_: TensorEntry) -> Iterator[bytes]:
        yield b"x" * 1000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_set(tmp_path, [file], tensors, source, quiet)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    file, _ = plan()
    (tmp_path / "x.gguf").write_text("precious")
    with pytest.raises(UsageError, match=r"x\.gguf is already there; delete"):
        write_set(tmp_path, [file], [], lambda tensor: [], quiet)
    assert (tmp_path / "x.gguf").read_text() == "precious"


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tensors = plan(1 << 30)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 30))
    with pytest.raises(ArtifactError, match=r"1\.0 GiB are to be written and 1\.0 GiB are free; choose another"):
        write_set(tmp_path, [file], tensors, lambda tensor: itertools.repeat(b"x"), quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_header_of_another_length_is_refused() -> None:
    with pytest.raises(NotAModel, match=r"x\.gguf: the header has \d+ bytes, not 64"):
        planned_file("x.gguf", [pair("general.name", "v" * 100)], [], header_bytes=64, size_bytes=64)

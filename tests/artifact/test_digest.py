from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

import platformdirs
import pytest

from bench.page_cache import drop, resident_bytes
from swarm.artifact.digest import SUFFIX, file_digests
from swarm.errors import NotAModel

CONTENT = b"weights" * 3_000_000
NO_DIGEST = b'{"size":0,"mtime_ns":0,"ctime_ns":0,"inode":0,"sha256":7}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "a.gguf"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: folder / name)
    return folder


class Calls:
    """Counts what was read."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.seen.append((done, total))


def test_progress_runs_to_the_total_over_all_files(model: Path) -> None:
    other = model.with_name("b.gguf")
    other.write_bytes(b"x" * 100)
    calls = Calls()
    digests = file_digests([model, other], calls)
    assert digests == (hashlib.sha256(CONTENT).hexdigest(), hashlib.sha256(b"x" * 100).hexdigest())
    assert calls.seen[-1] == (len(CONTENT) + 100, len(CONTENT) + 100)
    assert [done for done, _ in calls.seen] == sorted(done for done, _ in calls.seen)
    assert len(calls.seen) > 5


def test_an_unchanged_file_is_not_read_again(model: Path) -> None:
    first = file_digests([model])
    calls = Calls()
    assert file_digests([model], calls) == first
    assert calls.seen == []
    assert model.with_name(model.name + SUFFIX).is_file()


@pytest.mark.parametrize("change", ["content", "mtime", "inode"])
def test_a_changed_file_is_read_again(model: Path, change: str) -> None:
    file_digests([model])
    status = model.stat()
    if change == "content":
        model.write_bytes(CONTENT + b"!")
    elif change == "mtime":
        os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    else:
        copy = model.with_name("copy")
        copy.write_bytes(b"W" + CONTENT[1:])
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        copy.replace(model)
    assert file_digests([model]) == (hashlib.sha256(model.read_bytes()).hexdigest(),)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"size": 1}', NO_DIGEST, b"x" * 10_000, b"\xff", b"[" * 4000])
def test_a_damaged_note_is_replaced(model: Path, damage: bytes) -> None:
    note = model.with_name(model.name + SUFFIX)
    note.write_bytes(damage)
    assert file_digests([model]) == (hashlib.sha256(CONTENT).hexdigest(),)
    assert json.loads(note.read_bytes())["size"] == len(CONTENT)


def test_a_note_that_is_a_pipe_is_not_waited_for(model: Path) -> None:
    os.mkfifo(model.with_name(model.name + SUFFIX))
    assert file_digests([model]) == (hashlib.sha256(CONTENT).hexdigest(),)


def test_a_note_with_a_digest_that_is_none_is_not_believed(model: Path) -> None:
    file_digests([model])
    note = model.with_name(model.name + SUFFIX)
    note.write_text(json.dumps({**json.loads(note.read_text()), "sha256": "z" * 64}))
    assert file_digests([model]) == (hashlib.sha256(CONTENT).hexdigest(),)


def test_a_folder_that_refuses_the_note_gets_it_in_the_cache(model: Path, cache: Path) -> None:
    # a folder of that name stands in the way: works for root too, whom permissions do not stop
    model.with_name(model.name + SUFFIX).mkdir()
    first = file_digests([model])
    assert len(list(cache.rglob("*.json"))) == 1
    calls = Calls()
    assert file_digests([model], calls) == first
    assert calls.seen == []
    assert sorted(path.name for path in model.parent.iterdir()) == ["a.gguf", "a.gguf" + SUFFIX]


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not stop root")
def test_a_read_only_folder(model: Path, cache: Path) -> None:
    model.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        file_digests([model])
    finally:
        model.parent.chmod(stat.S_IRWXU)
    assert len(list(cache.rglob("*.json"))) == 1


def test_a_file_that_grows_meanwhile_is_refused(model: Path) -> None:
    def grow(_done: int, _total: int) -> None:
        with model.open("ab") as stream:
            stream.write(b"!")

    with pytest.raises(NotAModel, match=r"a\.gguf: changed while it was read"):
        file_digests([model], grow)
    assert not model.with_name(model.name + SUFFIX).exists()


def test_progress_may_stop_the_reading(model: Path) -> None:
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        file_digests([model], stop)
    assert not model.with_name(model.name + SUFFIX).exists()


def test_holes_count_as_zeros_and_are_not_read(tmp_path: Path) -> None:
    """Reading them would put them into the page cache, as many gigabytes as the hole has."""
    path = tmp_path / "sparse.gguf"
    size, places = (96 << 20) + 17, (0, (40 << 20) + 5)
    with path.open("wb") as file:
        for place in places:
            file.seek(place)
            file.write(b"data" * 5000)
        file.truncate(size)
    drop([path])
    calls = Calls()
    (digest,) = file_digests([path], calls)
    assert calls.seen[-1] == (size, size)
    assert resident_bytes([path]) < 32 << 20
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_is_one_hole(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    os.truncate(path, (5 << 20) + 3)
    assert file_digests([path]) == (hashlib.sha256(bytes((5 << 20) + 3)).hexdigest(),)

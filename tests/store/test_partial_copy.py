"""What a folder holds of a model: durable pieces, true states, and files that are left alone."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.artifact.manifest import FileEntry, Manifest, load_manifest
from swarm.errors import SourceError, StoreError
from swarm.store.partial_copy import PartialCopy
from swarm.store.piece_state import SUFFIX, write_state
from swarm.store.pieces import DIGEST_BYTES, PIECE_BYTES, Piece
from tests.artifact import files
from tests.store import parts
from tests.store.parts import SMALL, Sample, every_piece, fill, wrong

LARGE = Sample((9 << 20, 5 << 20, 100))  # tensors of several pieces, blocks that can be freed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def _state(folder: Path, number: int = 2) -> Path:
    return folder / f"sample-{number}.gguf{SUFFIX}"


def _filled(folder: Path, sample: Sample = SMALL) -> None:
    with PartialCopy.open(folder, sample.manifest) as copy:
        fill(copy, sample, every_piece(copy))


# --- storing


def test_what_is_committed_is_here_after_opening_again(folder: Path) -> None:
    with PartialCopy.open(folder, LARGE.manifest) as copy:
        tensor = copy.table.of_tensor("blk.0.w")
        assert len(tensor) == 3
        fill(copy, LARGE, tensor[:2])
        copy.write(tensor[2], LARGE.data(tensor[2]))
        assert copy.missing(tensor) == (tensor[2],)
        assert copy.tensor_digest("blk.0.w") is None
    with PartialCopy.open(folder, LARGE.manifest) as copy:
        assert copy.missing(tensor) == (tensor[2],)
        assert copy.held_bytes(tensor) == 2 * PIECE_BYTES
        fill(copy, LARGE, tensor[2:])
        blocks = (LARGE.data(piece)[: piece.bytes - piece.padding] for piece in tensor)
        assert copy.tensor_digest("blk.0.w") == sha256(b"".join(sha256(block).digest() for block in blocks)).hexdigest()
        assert (folder / "sample-2.gguf").stat().st_size == LARGE.manifest.files[1].size_bytes
        assert not (folder / "sample-3.gguf").exists()
        assert copy.taken_bytes(every_piece(copy)) < 10 << 20
        assert not copy.whole(1)
        fill(copy, LARGE, copy.missing(copy.table.of_file(1)))
        assert copy.whole(1)
    assert (folder / "sample-2.gguf").read_bytes() == LARGE.files[1]


def test_the_padding_of_a_whole_file_is_the_sources(folder: Path) -> None:
    _filled(folder)
    assert [(folder / file.name).read_bytes() for file in SMALL.manifest.files] == list(SMALL.files)


def test_a_piece_that_is_written_again_is_missing_until_it_is_committed(folder: Path) -> None:
    _filled(folder)
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        piece = copy.table.of_tensor("blk.3.w")[0]
        copy.write(piece, bytes(piece.bytes))
        assert not copy.has(piece)
        assert PartialCopy.look(folder, SMALL.manifest).missing(every_piece(copy)) == (piece,)
        copy.commit()
        assert copy.has(piece)
        assert [found.tensor for found in wrong(copy, SMALL)] == ["blk.3.w"]


def test_a_failing_disk_marks_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed sync the system takes the pages for clean: syncing again would say that all is well."""

    def fail(_handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with PartialCopy.open(folder, SMALL.manifest) as copy:
        pieces = every_piece(copy)
        fill(copy, SMALL, pieces[:3])
        copy.write(pieces[3], SMALL.data(pieces[3]))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", fail)
            with pytest.raises(StoreError, match="check the disk, then start again"):
                copy.commit()
        assert copy.commit() == 0
        assert copy.missing(pieces) == pieces[3:]
    assert PartialCopy.look(folder, SMALL.manifest).missing(pieces) == pieces[3:]


def test_threads_write_while_others_commit(folder: Path) -> None:
    with PartialCopy.open(folder, SMALL.manifest) as copy, ThreadPoolExecutor(8) as pool:
        pieces = every_piece(copy)

        def store(piece: Piece) -> int:
            copy.write(piece, SMALL.data(piece))
            return copy.commit() if piece.index % 5 == 0 else 0

        n_committed = sum(pool.map(store, pieces)) + copy.commit()
        assert n_committed == len(pieces)
        assert copy.missing(pieces) == ()
        assert wrong(copy, SMALL) == []
    assert PartialCopy.look(folder, SMALL.manifest).missing(pieces) == ()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    acts=st.lists(
        st.tuples(st.sampled_from(("write", "commit", "forget", "free", "open")), st.sets(st.integers(0, 34)))
    )
)
def test_any_order_of_acts(tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, set[int]]]) -> None:
    folder = tmp_path_factory.mktemp("acts")
    copy = PartialCopy.open(folder, SMALL.manifest)
    pieces = every_piece(copy)
    durable: set[int] = set()
    pending: set[int] = set()
    for act, chosen in acts:
        if act == "write":
            for number in chosen:
                copy.write(pieces[number], SMALL.data(pieces[number]))
            pending |= chosen
            durable -= chosen
        elif act == "commit":
            assert copy.commit() == len(pending)
            durable, pending = durable | pending, set()
        elif act == "open":
            copy.close()
            copy, pending = PartialCopy.open(folder, SMALL.manifest), set()
        else:
            getattr(copy, act)(pieces[number] for number in chosen)
            durable, pending = durable - chosen, pending - chosen
        assert {number for number, piece in enumerate(pieces) if copy.has(piece)} == durable
        assert wrong(copy, SMALL) == []
    copy.close()


# --- states that are not true


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[: len(data) // 2], id="torn"),
        pytest.param(lambda data: data[:-1], id="a byte short"),
        pytest.param(lambda data: bytes(len(data)), id="zeros"),
        pytest.param(lambda data: data[:90] + bytes([data[90] ^ 1]) + data[91:], id="a bit flipped"),
        pytest.param(lambda data: data + data, id="twice"),
        pytest.param(lambda data: os.urandom(len(data)), id="garbage"),
    ],
)
def test_a_damaged_state_counts_as_nothing_and_is_told(folder: Path, spoil: Callable[[bytes], bytes]) -> None:
    _filled(folder)
    _state(folder).write_bytes(spoil(_state(folder).read_bytes()))
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        assert copy.missing(every_piece(copy)) == copy.table.of_file(1)
        assert copy.remarks == ("sample-2.gguf.pieces: damaged; what was here of the file counts as missing",)
        assert copy.unknown == ()
        fill(copy, SMALL, copy.table.of_file(1)[:2])
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        assert copy.held_bytes(copy.table.of_file(1)) == sum(piece.bytes for piece in copy.table.of_file(1)[:2])
        assert copy.remarks == ()


def test_a_state_of_other_pieces_counts_as_nothing(folder: Path) -> None:
    _filled(folder)
    write_state(_state(folder), SMALL.manifest.artifact_id, bytes(b"1" * DIGEST_BYTES))
    copy = PartialCopy.look(folder, SMALL.manifest)
    assert copy.missing(every_piece(copy)) == copy.table.of_file(1)


def test_a_folder_of_another_model_is_refused_and_left_as_it_is(folder: Path) -> None:
    _filled(folder)
    other = replace(SMALL.manifest, header_sha256="f" * 64)
    before = {path: path.read_bytes() for path in folder.glob("sample*")}
    with pytest.raises(StoreError, match=r"of another model, artifact \w{12}; choose another folder with --data-dir"):
        PartialCopy.open(folder, other)
    assert {path: path.read_bytes() for path in folder.glob("sample*")} == before
    with PartialCopy.open(folder, SMALL.manifest):
        pass  # it is not in use by the one that was refused


def test_a_folder_of_another_model_is_refused_by_other_names_too(folder: Path) -> None:
    _filled(folder)
    names = [f"other-{number}.gguf" for number in range(3)]
    other = replace(SMALL.manifest, header_sha256="f" * 64).with_file_names(names)
    with pytest.raises(StoreError, match="of another model"):
        PartialCopy.open(folder, other)


def test_a_state_of_a_newer_version_is_refused(folder: Path) -> None:
    _filled(folder)
    data = bytearray(_state(folder).read_bytes())
    data[8] = 9
    _state(folder).write_bytes(data[:-DIGEST_BYTES] + sha256(data[:-DIGEST_BYTES]).digest())
    with pytest.raises(StoreError, match="another version of this program"):
        PartialCopy.open(folder, SMALL.manifest)


# --- files that are not as they were left


def test_a_file_that_is_gone_is_missing_and_told(folder: Path) -> None:
    _filled(folder)
    (folder / "sample-2.gguf").unlink()
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        assert copy.missing(every_piece(copy)) == copy.table.of_file(1)
        assert copy.remarks == ("sample-2.gguf: gone; what was here of it counts as missing",)
        copy.write(copy.table.of_file(1)[0], SMALL.data(copy.table.of_file(1)[0]))
    copy = PartialCopy.look(folder, SMALL.manifest)  # the old marks must not come back with the new file
    assert copy.missing(every_piece(copy)) == copy.table.of_file(1)


def test_what_was_behind_the_end_of_a_file_that_is_cut_off_is_missing(folder: Path) -> None:
    _filled(folder)
    os.truncate(folder / "sample-2.gguf", 20_000)
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        lost = tuple(piece for piece in copy.table.of_file(1) if piece.stop > 20_000)
        assert copy.missing(every_piece(copy)) == lost
        assert copy.remarks == ("sample-2.gguf: cut off at byte 20000; what was behind counts as missing",)
        copy.write(lost[-1], SMALL.data(lost[-1]))  # the file has its size again
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        assert copy.missing(every_piece(copy)) == lost
        assert wrong(copy, SMALL) == []
        fill(copy, SMALL, lost)
    assert (folder / "sample-2.gguf").read_bytes() == SMALL.files[1]


def test_a_file_that_has_become_longer_is_refused(folder: Path) -> None:
    _filled(folder)
    with (folder / "sample-2.gguf").open("ab") as stream:
        stream.write(b"more")
    size = SMALL.manifest.files[1].size_bytes
    with pytest.raises(StoreError, match=f"it has {size + 4} bytes and not {size}; move it away"):
        PartialCopy.open(folder, SMALL.manifest)


def test_a_file_that_is_deleted_while_it_is_written_is_told(folder: Path) -> None:
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        pieces = copy.table.of_file(1)
        fill(copy, SMALL, pieces[:2])
        copy.write(pieces[2], SMALL.data(pieces[2]))
        (folder / "sample-2.gguf").unlink()
        with pytest.raises(StoreError, match="deleted while it was in use"):
            copy.commit()
        with pytest.raises(StoreError, match="deleted while it was in use"):
            copy.write(pieces[3], SMALL.data(pieces[3]))


@pytest.mark.parametrize("kind", ["folder", "pipe", "nothing at the end of a link"])
def test_what_is_no_file_is_refused(folder: Path, kind: str) -> None:
    folder.mkdir()
    path = folder / "sample-2.gguf"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}.get(kind, lambda: path.symlink_to("nowhere"))()
    with pytest.raises(StoreError, match=r"sample-2\.gguf: (not a regular file|No such file)"):
        PartialCopy.open(folder, SMALL.manifest)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_state_that_is_no_file_is_refused(folder: Path, kind: str) -> None:
    folder.mkdir()
    _state(folder).mkdir() if kind == "folder" else os.mkfifo(_state(folder))
    with pytest.raises(StoreError, match=r"\.pieces: "):
        PartialCopy.open(folder, SMALL.manifest)


@pytest.mark.parametrize(
    "names", [("a", "b", "a"), ("", "b", "c"), ("../a", "b", "c"), ("a", "b", ".lock"), (".", "b", "c")]
)
def test_names_that_lead_elsewhere_are_refused(folder: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(StoreError, match="no names that could be used"):
        PartialCopy.open(folder, SMALL.manifest.with_file_names(names))


# --- files of others


def test_a_file_that_was_put_there_is_adopted_when_it_is_right(folder: Path) -> None:
    manifest = _true_digests()
    folder.mkdir()
    (folder / "sample-2.gguf").write_bytes(SMALL.files[1])
    with PartialCopy.open(folder, manifest) as copy:
        assert copy.unknown == (1,)
        assert copy.missing(every_piece(copy)) == every_piece(copy)
        with pytest.raises(StoreError, match="not put there by this program; move it away"):
            copy.write(copy.table.of_file(1)[0], SMALL.data(copy.table.of_file(1)[0]))
        assert copy.free(every_piece(copy)) == 0
        read = 0

        def on_bytes(n_bytes: int) -> None:
            nonlocal read
            read += n_bytes

        copy.adopt_whole(1, on_bytes)
        assert copy.whole(1)
        assert read == len(SMALL.files[1])
    with PartialCopy.open(folder, manifest) as copy:
        assert copy.whole(1)
        copy.check_whole(1)
        assert wrong(copy, SMALL) == []


def test_a_file_that_was_put_there_and_is_wrong_is_left_alone(folder: Path) -> None:
    folder.mkdir()
    mine = b"\1" * len(SMALL.files[1])
    (folder / "sample-2.gguf").write_bytes(mine)
    with PartialCopy.open(folder, _true_digests()) as copy:
        with pytest.raises(StoreError, match="not put there by this program, and not a whole file of sample"):
            copy.adopt_whole(1)
        assert copy.unknown == (1,)
    assert (folder / "sample-2.gguf").read_bytes() == mine
    assert not _state(folder).exists()


def test_a_file_of_another_size_that_was_put_there_is_refused(folder: Path) -> None:
    folder.mkdir()
    (folder / "sample-2.gguf").write_bytes(b"mine")
    with pytest.raises(StoreError, match="not put there by this program"):
        PartialCopy.open(folder, SMALL.manifest)
    assert (folder / "sample-2.gguf").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["hard", "symbolic"])
def test_the_other_name_of_a_linked_file_never_sees_a_change(folder: Path, tmp_path: Path, kind: str) -> None:
    original = tmp_path / "original.gguf"
    original.write_bytes(LARGE.files[1])
    with PartialCopy.open(folder, LARGE.manifest) as copy:
        pieces = copy.table.of_file(1)
        if kind == "hard":
            copy.link(1, original)
        else:
            (folder / "sample-2.gguf").symlink_to(original)
            write_state(_state(folder), LARGE.manifest.artifact_id, bytes(len(pieces) * DIGEST_BYTES))
        assert copy.missing(pieces) == pieces
        copy.adopt(pieces[1:])
        assert copy.missing(pieces) == pieces[:1]
        assert copy.is_linked(1)
        assert copy.free(pieces[1:]) == 0  # its room is the other name's
        assert copy.missing(pieces) == pieces[:1]
        copy.write(pieces[2], bytes(pieces[2].bytes))
        assert not copy.is_linked(1)
        copy.commit()
        assert copy.has(pieces[1])
        assert copy.read(pieces[1]) == LARGE.data(pieces[1])
        assert copy.free(pieces[2:]) > 0
    assert original.read_bytes() == LARGE.files[1]
    assert original.stat().st_nlink == 1


def test_a_link_is_made_where_nothing_is_lost(folder: Path, tmp_path: Path) -> None:
    original = tmp_path / "original.gguf"
    original.write_bytes(SMALL.files[1])
    with PartialCopy.open(folder, SMALL.manifest) as copy:
        pieces = copy.table.of_file(1)
        fill(copy, SMALL, pieces[:1])
        with pytest.raises(StoreError, match="parts of it are here already"):
            copy.link(1, original)
        copy.forget(pieces)
        copy.link(1, original)
        copy.link(1, original)  # again, after a death between linking and adopting
        copy.adopt(pieces)
        assert copy.whole(1)
        original.with_name("short").write_bytes(b"short")
        with pytest.raises(SourceError, match="choose another source"):
            copy.link(2, original.with_name("short"))
    assert sorted(path.name for path in folder.glob("sample-2*")) == ["sample-2.gguf", "sample-2.gguf.pieces"]


# --- one at a time


def test_two_processes_on_one_folder(folder: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    child = context.Process(target=parts.hold, args=(folder, SMALL, theirs))
    child.start()
    theirs.close()
    try:
        assert ours.recv_bytes() == b"o"
        with pytest.raises(StoreError, match=f"in use by process {child.pid}; end that one first, or choose another"):
            PartialCopy.open(folder, SMALL.manifest)
        copy = PartialCopy.look(folder, SMALL.manifest)  # reading is allowed
        assert len(copy.missing(every_piece(copy))) == len(every_piece(copy))
    finally:
        child.kill()
        child.join()
        ours.close()
    with PartialCopy.open(folder, SMALL.manifest), pytest.raises(StoreError, match=f"process {os.getpid()}"):
        PartialCopy.open(folder, SMALL.manifest)


# --- freeing


def test_freeing_gives_back_room_and_touches_nothing_else(folder: Path) -> None:
    _filled(folder, LARGE)
    with PartialCopy.open(folder, LARGE.manifest) as copy:
        before = copy.taken_bytes(every_piece(copy))
        middle = copy.table.of_tensor("blk.0.w")[1:]
        freed = copy.free(middle)
        assert freed == pytest.approx(sum(piece.bytes for piece in middle), abs=16384)
        assert copy.taken_bytes(every_piece(copy)) == before - freed
        assert copy.missing(every_piece(copy)) == middle
        assert wrong(copy, LARGE) == []
        assert copy.free(middle) == 0
        fill(copy, LARGE, middle)
    assert (folder / "sample-2.gguf").read_bytes() == LARGE.files[1]


def test_what_a_killed_process_left_is_freed_too(folder: Path) -> None:
    """Written and never marked."""
    with PartialCopy.open(folder, LARGE.manifest) as copy:
        piece = copy.table.of_tensor("blk.0.w")[0]
        copy.write(piece, LARGE.data(piece))
    with PartialCopy.open(folder, LARGE.manifest) as copy:
        assert not copy.has(piece)
        assert copy.taken_bytes([piece]) >= piece.bytes
        assert copy.free([piece]) >= piece.bytes - 8192


# --- as a model


def _true_digests() -> Manifest:
    entries = (
        replace(file, sha256=sha256(data).hexdigest())
        for file, data in zip(SMALL.manifest.files, SMALL.files, strict=True)
    )
    return replace(SMALL.manifest, files=tuple[FileEntry, ...](entries))


def test_headers_are_compared_before_they_are_believed(folder: Path, tmp_path: Path) -> None:
    first = files.write_glm(tmp_path / "model.gguf", 6, full=(True,) * 6, split_tensors=5)
    manifest = load_manifest(first)
    with PartialCopy.open(folder, manifest) as copy:
        headers = copy.table.headers()
        with pytest.raises(StoreError, match="its header is not here yet"):
            copy.local_copy()
        for piece in headers:
            copy.write(piece, (tmp_path / manifest.files[piece.file].name).read_bytes()[piece.start : piece.stop])
        copy.commit()
        assert copy.local_copy().paths == tuple(folder / file.name for file in manifest.files)
        assert copy.local_copy().unread == ()
        copy.write(headers[1], (tmp_path / manifest.files[2].name).read_bytes()[: headers[1].bytes])
        copy.commit()
        with pytest.raises(SourceError, match="headers from this source are not model's"):
            copy.local_copy()
        assert copy.missing(headers) == headers

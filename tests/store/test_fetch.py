"""Fetching spans: the right bytes and no others, whatever the source does and whenever it is interrupted."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench.range_server import Asked, Fault, RangeServer, Trouble
from swarm.artifact.manifest import Manifest
from swarm.errors import SourceError, StoreError
from swarm.store import committer
from swarm.store.fetch import Fetched, fetch
from swarm.store.partial_copy import PartialCopy
from swarm.store.patience import Patience
from swarm.store.pieces import Piece
from swarm.store.sources import FolderSource, HttpTimeouts, Source, Unavailable, open_source, opened_source
from tests.store.conftest import Served

HASTY = Patience(tries=6, first_pause_seconds=0.01, longest_pause_seconds=0.05, max_asked_seconds=5)
SPAN = (2, 6)


@pytest.fixture
def copy(served: Served, tmp_path: Path) -> Iterator[PartialCopy]:
    with PartialCopy.open(tmp_path / "copy", served.manifest) as copy:
        yield copy


@pytest.fixture
def server(served: Served) -> Iterator[RangeServer]:
    with RangeServer(served.folder) as server:
        yield server


IMPATIENT = HttpTimeouts(connect_seconds=0.2, silence_seconds=0.5)


async def fetched(
    copy: PartialCopy,
    source: str | Source,
    pieces: Sequence[Piece],
    timeouts: HttpTimeouts | None = None,
    **options: object,
) -> Fetched:
    if not isinstance(source, str):
        return await fetch(copy, source, pieces, patience=HASTY, **options)  # type: ignore[arg-type]
    async with opened_source(source, copy.manifest, timeouts=timeouts) as opened:
        return await fetch(copy, opened, pieces, patience=HASTY, **options)  # type: ignore[arg-type]


def planned(pieces: Sequence[Piece]) -> int:
    return sum(piece.bytes for piece in pieces)


def check(copy: PartialCopy, served: Served, pieces: Sequence[Piece]) -> None:
    """Held and right, and what is not of these pieces reads as zeros."""
    for file, entry in enumerate(served.manifest.files):
        expected = bytearray(entry.size_bytes)
        original = (served.folder / entry.name).read_bytes()
        for piece in pieces:
            if piece.file == file:
                expected[piece.start : piece.stop] = original[piece.start : piece.stop]
        assert (copy.folder / entry.name).read_bytes() == expected, entry.name
    assert not copy.missing(pieces)


async def test_a_span_takes_its_own_bytes(copy: PartialCopy, served: Served, server: RangeServer) -> None:
    pieces = copy.table.of_span(*SPAN)
    seen: list[tuple[int, int]] = []
    result = await fetched(copy, server.url, pieces, on_progress=lambda *at: seen.append(at))
    check(copy, served, pieces)
    n_files = len(served.manifest.files)
    assert result.bytes == planned(pieces)
    assert server.sent_bytes == planned(pieces) + n_files  # a byte of each file to learn its size
    assert result.retries == 0
    assert result.requests == len(server.asked) - n_files
    assert seen[0] == (0, planned(pieces))
    assert seen[-1] == (planned(pieces), planned(pieces))
    assert seen == sorted(seen)
    assert copy.local_copy().manifest.artifact_id == served.manifest.artifact_id


async def test_headers_come_first(copy: PartialCopy, served: Served, server: RangeServer) -> None:
    pieces = copy.table.of_span(*SPAN)
    await fetched(copy, server.url, pieces)
    asked = server.asked[len(served.manifest.files) :]
    headers = [each.stop <= served.manifest.files[_number(each)].header_bytes for each in asked]
    assert headers == sorted(headers, reverse=True)
    assert sum(headers) == len(served.manifest.files)


def _number(asked: Asked) -> int:
    return int(asked.path.rpartition("/")[2].split("-")[1]) - 1


async def test_wrong_headers_end_it_before_the_weights(served: Served, tmp_path: Path, server: RangeServer) -> None:
    server.troubles.append(Trouble(Fault.FLIP, start=0, file="00002", every=2))  # not the question for its size
    with PartialCopy.open(tmp_path / "copy", served.manifest) as copy:
        with pytest.raises(SourceError, match="headers from this source are not split's"):
            await fetched(copy, server.url, copy.table.of_span(*SPAN))
        assert not copy.held_bytes(copy.table.headers())
        assert server.sent_bytes < 100_000
        server.troubles.clear()
        await fetched(copy, server.url, copy.table.of_span(*SPAN))  # the folder is as good as before
        check(copy, served, copy.table.of_span(*SPAN))


async def test_growing_fetches_only_what_is_new(copy: PartialCopy, served: Served, server: RangeServer) -> None:
    before, after = copy.table.of_span(*SPAN), copy.table.of_span(1, 8, True)
    await fetched(copy, server.url, before)
    result = await fetched(copy, server.url, after)
    assert result.bytes == planned(after) - planned(before)
    check(copy, served, after)
    again = await fetched(copy, server.url, after)
    assert (again.bytes, again.requests) == (0, 0)


PASSING = [Fault.ERROR, Fault.BUSY, Fault.DROP, Fault.GARBAGE, Fault.STALL, Fault.SILENCE, Fault.WRONG_LENGTH]


@pytest.mark.parametrize("fault", PASSING, ids=[fault.name for fault in PASSING])
async def test_what_passes_is_outlasted(copy: PartialCopy, served: Served, server: RangeServer, fault: Fault) -> None:
    server.troubles.append(Trouble(fault, every=2, start=0, times=6))
    pieces = copy.table.of_span(*SPAN)
    result = await fetched(copy, server.url, pieces, IMPATIENT)
    check(copy, served, pieces)
    assert result.retries >= 1
    assert result.bytes == planned(pieces)


async def test_all_faults_together(copy: PartialCopy, served: Served, server: RangeServer) -> None:
    rng = random.Random(5)
    server.troubles += [Trouble(fault, every=rng.randint(3, 7)) for fault in (*PASSING, Fault.SLOW, Fault.REDIRECT)]
    pieces = copy.table.of_span(0, 8, True)
    result = await fetched(copy, server.url, pieces, IMPATIENT)
    check(copy, served, pieces)
    assert result.bytes == planned(pieces)
    assert {asked.fault for asked in server.asked} - {None}


LIES = [Fault.NO_RANGES, Fault.WRONG_TOTAL, Fault.WRONG_RANGE, Fault.NEW_ETAG, Fault.MISSING, Fault.SHORT, Fault.LONG]


@pytest.mark.parametrize("fault", LIES, ids=[fault.name for fault in LIES])
async def test_a_lie_in_the_middle_ends_it(
    copy: PartialCopy, served: Served, server: RangeServer, fault: Fault
) -> None:
    """At once, with what came before kept."""
    pieces = copy.table.of_span(1, 8)
    server.troubles.append(Trouble(fault, start=10_000, file="-00004-of"))
    with pytest.raises(SourceError, match=r"split-00004-of-00004\.gguf: .*; "):
        await fetched(copy, server.url, pieces, parallel=1)
    assert sum(asked.fault is not None for asked in server.asked) == 1
    kept = copy.held_bytes(pieces)
    server.troubles.clear()
    result = await fetched(copy, server.url, pieces)
    assert result.bytes == planned(pieces) - kept
    check(copy, served, pieces)


async def test_a_server_that_never_comes_back_is_given_up(copy: PartialCopy, server: RangeServer) -> None:
    server.troubles.append(Trouble(Fault.ERROR, file="00003"))
    with pytest.raises(
        SourceError, match=r"busy \(status 503\); 6 tries in a row brought nothing; what is here is kept"
    ):
        await fetched(copy, server.url, copy.table.of_span(*SPAN))


async def test_a_pause_that_is_asked_for_is_kept_by_all(copy: PartialCopy, server: RangeServer) -> None:
    moments: list[float] = []
    server.on_request = lambda asked: moments.append(time.monotonic())
    server.troubles.append(Trouble(Fault.BUSY, times=1, start=10_000, header="1"))
    await fetched(copy, server.url, copy.table.of_span(*SPAN), parallel=1)
    busy = next(index for index, asked in enumerate(server.asked) if asked.fault)
    assert moments[busy + 1] - moments[busy] >= 1


async def test_a_pause_of_hours_is_not_waited_for(copy: PartialCopy, server: RangeServer) -> None:
    server.troubles.append(Trouble(Fault.BUSY, start=0, header="7200"))
    with pytest.raises(
        SourceError, match="it asks for a pause of 120 minutes; what is here is kept, fetch again after"
    ):
        await fetched(copy, server.url, copy.table.of_span(*SPAN))


async def test_a_limit_is_kept(copy: PartialCopy, server: RangeServer) -> None:
    pieces = copy.table.of_span(*SPAN)
    rate = planned(pieces)  # a second
    result = await fetched(copy, server.url, pieces, limit_bytes_per_second=rate)
    assert result.seconds >= 0.9


async def test_a_limit_is_no_silence_of_the_server(copy: PartialCopy, server: RangeServer) -> None:
    """Nothing is read for longer than a server may be silent: nobody waits for it then."""
    tensor = max(copy.manifest.tensors, key=lambda tensor: tensor.bytes)
    pieces = copy.table.of_tensor(tensor.name)
    rate = planned(pieces) // 4
    result = await fetched(copy, server.url, pieces, IMPATIENT, limit_bytes_per_second=rate)
    assert result.seconds > 3
    assert result.retries == 0


class _Endless:
    """A source that gives zeros, and notes how much of them it gave."""

    name = "zeros"

    def __init__(self) -> None:
        self.given = 0

    async def open(self, manifest: Manifest) -> None:
        pass

    async def read(self, file: int, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        for at in range(start, stop, 1 << 20):
            data = bytes(min(1 << 20, stop - at))
            self.given += len(data)
            yield data

    async def close(self) -> None:
        pass


# --- tensors that are looked at


async def test_each_tensor_is_looked_at_when_it_is_durable(
    copy: PartialCopy, served: Served, server: RangeServer
) -> None:
    seen: list[str] = []

    def look(tensor: str) -> bool:
        assert copy.tensor_digest(tensor) is not None
        seen.append(tensor)
        return True

    pieces = copy.table.of_span(*SPAN)
    names = sorted({piece.tensor for piece in pieces} - {""})
    await fetched(copy, server.url, pieces, on_tensor=look)
    assert sorted(seen) == names
    seen.clear()
    await fetched(copy, server.url, pieces, on_tensor=look)  # a fetch that was killed may not have looked
    assert sorted(seen) == names


async def test_a_wrong_tensor_is_fetched_again(copy: PartialCopy, served: Served, server: RangeServer) -> None:
    pieces = copy.table.of_span(*SPAN)
    with PartialCopy.open(copy.folder.with_name("right"), served.manifest) as other:
        await fetched(other, server.url, pieces)
        digests = {piece.tensor: other.tensor_digest(piece.tensor) for piece in pieces if piece.tensor}
    before = server.sent_bytes
    server.troubles.append(Trouble(Fault.FLIP, times=1, start=10_000))
    wrong: list[str] = []

    def look(tensor: str) -> bool:
        right = copy.tensor_digest(tensor) == digests[tensor]
        wrong.extend([] if right else [tensor])
        return right

    result = await fetched(copy, server.url, pieces, on_tensor=look)
    check(copy, served, pieces)
    assert len(wrong) == 1
    again = planned(copy.table.of_tensor(wrong[0]))
    assert result.bytes == planned(pieces) + again  # that one alone
    assert server.sent_bytes - before == result.bytes + len(served.manifest.files)


async def test_a_tensor_that_stays_wrong_ends_it(copy: PartialCopy, server: RangeServer) -> None:
    name = "blk.3.attn_norm.weight"
    with pytest.raises(SourceError, match=f"{server.url}: tensor {name} has wrong bytes, also when fetched again"):
        await fetched(copy, server.url, copy.table.of_span(*SPAN), on_tensor=lambda tensor: tensor != name)
    assert copy.tensor_digest(name) is None


# --- interruptions


async def test_cancelling_keeps_what_came(copy: PartialCopy, served: Served, server: RangeServer) -> None:
    """Without waiting for the next commit."""
    pieces = copy.table.of_span(*SPAN)
    half = asyncio.Event()

    def on_progress(done: int, total: int) -> None:
        if done > total // 2:
            half.set()

    server.troubles.append(Trouble(Fault.SLOW))
    task = asyncio.create_task(fetched(copy, server.url, pieces, on_progress=on_progress))
    await half.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    kept = copy.held_bytes(pieces)
    assert kept > planned(pieces) // 4
    server.troubles.clear()
    result = await fetched(copy, server.url, pieces)
    assert result.bytes == planned(pieces) - kept
    check(copy, served, pieces)


async def test_commits_come_while_it_fetches(
    copy: PartialCopy, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "COMMIT_BYTES", 1 << 20)
    pieces = copy.table.of_span(0, 8, True)
    held: list[int] = []
    server.on_request = lambda asked: held.append(copy.held_bytes(pieces))
    result = await fetched(copy, server.url, pieces, parallel=1)
    assert result.bytes == planned(pieces)
    assert held[-1] > 0


async def test_a_full_disk_ends_it(copy: PartialCopy, server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves a copy that goes on."""
    pieces = copy.table.of_span(*SPAN)
    write, written = os.pwrite, threading.Event()

    def full(handle: int, data: bytes, at: int) -> int:
        if at > 1_000_000:
            written.set()
            raise OSError(28, "No space left on device")
        return write(handle, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match=r"No space left on device; make room there"):
        await fetched(copy, server.url, pieces)
    monkeypatch.undo()
    assert written.is_set()
    await fetched(copy, server.url, pieces)
    assert not copy.missing(pieces)


async def test_no_room_is_told_before_a_byte_is_asked_for(served: Served, tmp_path: Path, server: RangeServer) -> None:
    with PartialCopy.open(tmp_path / "copy", served.manifest, disk_reserve_bytes=1 << 60) as copy:
        pieces = copy.table.of_span(*SPAN)
        with pytest.raises(StoreError, match="more have to be free"):
            await fetched(copy, server.url, pieces)
    assert not server.asked


async def test_memory_stays_small(tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 512 MiB takes a few pieces of memory."""
    size = 512 << 20
    last = served.manifest.files[-1]
    tensors = [tensor for tensor in served.manifest.tensors if tensor.file < 3]
    big = replace(next(t for t in served.manifest.tensors if t.file == 3), bytes=size, dims=(size // 4,), type="F32")
    files = (*served.manifest.files[:-1], replace(last, size_bytes=big.offset + size))
    manifest = replace(served.manifest, files=files, tensors=(*tensors, big))
    source = _Endless()
    with PartialCopy.open(tmp_path / "copy", manifest) as copy:
        monkeypatch.setattr(copy, "write", lambda piece, data: None)
        process, most = psutil.Process(), 0
        before = process.memory_info().rss

        def on_progress(done: int, total: int) -> None:
            nonlocal most
            most = max(most, process.memory_info().rss)

        result = await fetched(copy, source, copy.table.of_tensor(big.name), on_progress=on_progress)
    assert result.bytes == source.given == planned(copy.table.of_tensor(big.name))
    assert most - before < 64 << 20


# --- a folder as the source


async def test_a_folders_files_are_linked(copy: PartialCopy, served: Served, tmp_path: Path) -> None:
    """It takes no room, and the original is never written."""
    pieces = copy.table.of_span(*SPAN)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in served.folder.iterdir()}
    result = await fetched(copy, str(served.folder), pieces)
    assert not copy.missing(pieces)
    assert result.bytes == planned(pieces)
    names = [file.name for file in served.manifest.files]
    assert all((copy.folder / name).samefile(served.folder / name) for name in names)
    more = copy.table.of_span(0, 8)
    await fetched(copy, str(served.folder), more)  # the links stay, and more of them counts
    assert not copy.missing(more)
    assert all((copy.folder / name).samefile(served.folder / name) for name in names)
    copy.forget(more)
    with RangeServer(served.folder) as server:
        await fetched(copy, server.url, more)  # written: no link any more
    assert not any((copy.folder / name).samefile(served.folder / name) for name in names)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in served.folder.iterdir()} == before


async def test_a_folder_of_links_is_linked_with_what_they_lead_to(
    copy: PartialCopy, served: Served, tmp_path: Path
) -> None:
    """As in the hub's own cache, where they are relative: the same words lead elsewhere from another folder."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(served.manifest.files):
        os.link(served.folder / file.name, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    pieces = copy.table.of_span(*SPAN)
    await fetched(copy, str(snapshot), pieces)
    assert not copy.missing(pieces)
    for number, file in enumerate(served.manifest.files):
        assert not (copy.folder / file.name).is_symlink()
        assert (copy.folder / file.name).samefile(blobs / str(number))


async def test_a_folder_with_parts_gives_its_parts(copy: PartialCopy, served: Served, tmp_path: Path) -> None:
    """Its holes are not taken for weights."""
    small, large = copy.table.of_span(2, 6), copy.table.of_span(0, 8)
    with RangeServer(served.folder) as server:
        await fetched(copy, server.url, small)
    with PartialCopy.open(tmp_path / "next", served.manifest) as other:
        await fetched(other, str(copy.folder), small)
        check(other, served, small)
        with pytest.raises(SourceError, match=r"split-0000\d-of-00004\.gguf: is itself only a part: .* is not in it"):
            await fetched(other, str(copy.folder), large)


async def test_parts_are_not_freed_while_they_are_copied(copy: PartialCopy, served: Served, tmp_path: Path) -> None:
    """The holes would be taken for weights."""
    pieces = copy.table.of_span(*SPAN)
    with RangeServer(served.folder) as server:
        await fetched(copy, server.url, pieces)
    with PartialCopy.open(tmp_path / "second", served.manifest) as second:
        await fetched(second, str(copy.folder), copy.table.headers())  # while another has it
        copy.close()
        source = FolderSource(copy.folder)
        await source.open(served.manifest)
        with pytest.raises(StoreError, match="in use by process"):
            PartialCopy.open_existing(copy.folder, served.manifest)
        await fetched(second, source, pieces)
        await source.close()
        assert not second.missing(pieces)
    PartialCopy.open_existing(copy.folder, served.manifest).close()


async def test_a_folder_without_a_file(copy: PartialCopy, served: Served, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.mkdir()
    for entry in served.manifest.files[:-1]:
        (part / entry.name).hardlink_to(served.folder / entry.name)
    with pytest.raises(SourceError, match=r"split-00004-of-00004\.gguf: can't be read \(No such file or directory\)"):
        await fetched(copy, str(part), copy.table.of_span(*SPAN))
    (part / served.manifest.files[-1].name).write_bytes(b"short")
    with pytest.raises(SourceError, match=r"has 5 bytes where the file of split has 4268544"):
        await fetched(copy, str(part), copy.table.of_span(*SPAN))


async def test_a_folder_source_reads_ranges(served: Served) -> None:
    source = open_source(str(served.folder), served.manifest)
    assert isinstance(source, FolderSource)
    await source.open(served.manifest)
    data = b"".join([block async for block in source.read(1, 100, 3_000_000)])
    assert data == (served.folder / served.manifest.files[1].name).read_bytes()[100:3_000_000]
    await source.close()
    assert issubclass(Unavailable, SourceError)

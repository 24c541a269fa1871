"""Fetches the pieces of a model that are missing: the headers of all files, then the tensors.

Neighbouring pieces are asked for at once, several requests run at a time, each goes on where its connection broke, and
what has arrived is made durable every two seconds. So a fetch may end at any moment, and the next one goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from swarm.artifact.digest import Progress
from swarm.errors import SourceError, first_error
from swarm.store.bucket import TokenBucket
from swarm.store.committer import Committer, OnTensor
from swarm.store.in_thread import in_thread
from swarm.store.linking import linked_files
from swarm.store.partial_copy import PartialCopy
from swarm.store.patience import Patience, Trying
from swarm.store.pieces import PIECE_BYTES, Piece
from swarm.store.request import MAX_REQUEST_BYTES, Request, coalesce
from swarm.store.sources.folder import FolderSource
from swarm.store.sources.source import Source, Unavailable
from swarm.store.transfer import Transfer
from swarm.store.whole_files import check_whole_files

PARALLEL = 4


@dataclass(frozen=True)
class Fetched:
    """What a fetch took. ``bytes`` are those that the source sent, ``retries`` failures after which it went on."""

    bytes: int
    requests: int
    retries: int
    seconds: float


async def fetch(
    copy: PartialCopy,
    source: Source,
    pieces: Sequence[Piece],
    *,
    again: Collection[Piece] = (),
    limit_bytes_per_second: int | None = None,
    parallel: int = PARALLEL,
    on_progress: Progress | None = None,
    on_tensor: OnTensor | None = None,
    patience: Patience | None = None,
) -> Fetched:
    """Fetches those of ``pieces`` that ``copy`` lacks, and those in ``again`` also when it has them: each counts as
    before until its new bytes are written. Opens ``source`` unless it is open.

    ``on_progress(bytes done, bytes in all)`` counts what was missing at the start. ``on_tensor(name) -> bool``, called
    in a thread, looks at each tensor of ``pieces`` that is durable, also one that was there before; one that it finds
    wrong is fetched again, once. Without it each file that is whole in the end is compared with its SHA-256.

    Cancelling, and every error, keeps whole pieces that came. Raises ``SourceError`` with what the source did wrong,
    and ``StoreError`` for the disk.
    """
    fetcher = _Fetcher(copy, source, limit_bytes_per_second, parallel, patience or Patience())
    fetcher.committer = Committer(copy, on_tensor, fetcher.again)
    fetcher.on_progress = on_progress
    start = time.monotonic()
    await fetcher.run(pieces, frozenset(again))
    if on_tensor is None:
        await check_whole_files(copy, {piece.file for piece in pieces}, source.name)
    return Fetched(fetcher.n_bytes, fetcher.n_requests, fetcher.n_retries, time.monotonic() - start)


class _Fetcher:
    def __init__(
        self, copy: PartialCopy, source: Source, bytes_per_second: int | None, parallel: int, patience: Patience
    ) -> None:
        self.n_bytes = self.n_requests = self.n_retries = 0
        self.committer: Committer
        self.on_progress: Progress | None = None
        self._copy = copy
        self._source = source
        self._bucket = None if bytes_per_second is None else TokenBucket(bytes_per_second)
        self._parallel = parallel
        self._patience = patience
        self._wanted: tuple[Piece, ...] = ()
        self._linked: frozenset[int] = frozenset()  # files that are the source's own
        self._queue: deque[Request] = deque()
        self._twice: set[str] = set()  # tensors that were wrong once
        self._not_before = 0.0  # the server asked all of us to pause
        self._total_bytes = 0

    async def run(self, pieces: Sequence[Piece], again: frozenset[Piece]) -> None:
        self._wanted = tuple(pieces)
        missing = [piece for piece in pieces if piece in again or not self._copy.has(piece)]
        self._total_bytes = sum(piece.bytes for piece in missing)
        if missing:
            await self._prepare(missing)
        self._progress(0)
        self.committer.expect({piece.tensor for piece in pieces}, missing)
        headers = [piece for piece in missing if not piece.tensor]
        await self._all(headers)
        if headers:
            await in_thread(self._copy.local_copy)
        await self._all([piece for piece in missing if piece.tensor])

    async def _prepare(self, missing: Sequence[Piece]) -> None:
        """Room first; a folder's files may take none."""
        if isinstance(self._source, FolderSource):
            await self._opened()
            self._linked = await in_thread(linked_files, self._copy, self._source, missing)
        await in_thread(self._copy.check_room, [piece for piece in missing if piece.file not in self._linked])
        await self._opened()

    def again(self, tensor: str) -> None:
        """Its bytes are wrong."""
        pieces = [piece for piece in self._wanted if piece.tensor == tensor]
        self._copy.forget(pieces)
        if tensor in self._twice:
            what = f"tensor {tensor} has wrong bytes, also when fetched again"
            raise SourceError(f"{self._source.name}: {what}; choose another --source")
        self._twice.add(tensor)
        self._total_bytes += sum(piece.bytes for piece in pieces)
        self.committer.expect((), pieces)
        self._queue.extendleft(coalesce(pieces))  # first of all

    async def _opened(self) -> None:
        trying = Trying(self._patience)
        async for attempt in trying.attempts():
            with attempt:
                await self._source.open(self._copy.manifest)
        self.n_retries += trying.retries

    async def _all(self, pieces: Sequence[Piece]) -> None:
        """Ends when all of them are durable and no tensor was wrong."""
        self._queue.extend(coalesce(pieces, self._request_bytes(pieces)))
        try:
            while True:
                if self._queue:
                    await self._opened()  # nothing may have been missing, and a tensor that is here be wrong
                    await self._workers()
                await self.committer.commit()
                if not self._queue:
                    return
        except BaseException:
            with suppress(SourceError):  # of a tensor that is wrong; the first error counts
                await self.committer.commit(always=True)
            raise

    def _request_bytes(self, pieces: Sequence[Piece]) -> int:
        """So that there is something to do for each worker."""
        share = sum(piece.bytes for piece in pieces) // (2 * self._parallel)
        return min(MAX_REQUEST_BYTES, max(PIECE_BYTES, share))

    async def _workers(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                end = asyncio.Event()
                group.create_task(self.committer.now_and_then(end))
                await asyncio.wait([group.create_task(self._worker()) for _ in range(self._parallel)])
                end.set()
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None

    async def _worker(self) -> None:
        while self._queue:
            request = self._queue.popleft()
            await (self._adopt(request) if request.file in self._linked else self._serve(request))

    async def _adopt(self, request: Request) -> None:
        """Bytes that are here with the link, and only have to be read."""
        self.n_requests += 1
        await in_thread(self._copy.adopt, request.pieces)
        self._progress(request.bytes)
        for piece in request.pieces:
            await self.committer.written(piece)

    async def _serve(self, request: Request) -> None:
        trying = Trying(self._patience)

        async def on_bytes(n_bytes: int) -> None:
            trying.progressed()
            await self._count(n_bytes)

        transfer = Transfer(request, self._keep, on_bytes)
        async for attempt in trying.attempts():
            with attempt:
                await self._pause()
                self.n_requests += 1
                try:
                    await transfer.run(self._source)
                except Unavailable as error:
                    self._hold(error.retry_after_seconds)
                    raise
        self.n_retries += trying.retries

    async def _keep(self, piece: Piece, data: bytearray) -> None:
        await in_thread(self._copy.write, piece, memoryview(data))
        await self.committer.written(piece)

    async def _count(self, n_bytes: int) -> None:
        self._progress(n_bytes)
        if self._bucket is not None:
            await asyncio.sleep(self._bucket.take(n_bytes, time.monotonic()))

    def _progress(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        if self.on_progress is not None:
            self.on_progress(self.n_bytes, self._total_bytes)

    def _hold(self, seconds: float | None) -> None:
        if seconds is not None and seconds <= self._patience.max_asked_seconds:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    async def _pause(self) -> None:
        left = self._not_before - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)

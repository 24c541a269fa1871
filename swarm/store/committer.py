"""Makes what has arrived durable, now and then, and has each tensor looked at that is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from swarm.store.in_thread import in_thread
from swarm.store.pieces import Piece

COMMIT_SECONDS = 2.0
COMMIT_BYTES = 256 << 20

OnTensor = Callable[[str], bool]
"""Called in a thread with the name of a tensor that is all there and durable; False: its bytes are wrong."""


class _Copy(Protocol):
    def commit(self) -> int: ...


class Committer:
    """A fetch that is killed loses what was written after the last commit: what came in two seconds, or 256 MiB and a
    piece per transfer, whichever is less. ``on_wrong`` hears of tensors whose bytes are wrong."""

    def __init__(self, copy: _Copy, on_tensor: OnTensor | None, on_wrong: Callable[[str], None]) -> None:
        self._copy = copy
        self._on_tensor = on_tensor
        self._on_wrong = on_wrong
        self._lock = asyncio.Lock()
        self._written: list[Piece] = []
        self._uncommitted_bytes = 0
        self._missing: dict[str, set[Piece]] = {}  # of tensors that are not checked

    def expect(self, tensors: Iterable[str], missing: Iterable[Piece]) -> None:
        """Tensors to check once all their pieces are durable, and the pieces that are to come."""
        for tensor in tensors:
            self._missing.setdefault(tensor, set())
        for piece in missing:
            self._missing.setdefault(piece.tensor, set()).add(piece)
        self._missing.pop("", None)  # headers are no tensor

    async def written(self, piece: Piece) -> None:
        """Waits while too much is not durable."""
        self._written.append(piece)
        self._uncommitted_bytes += piece.bytes
        if self._uncommitted_bytes >= COMMIT_BYTES:
            await self.commit()

    async def now_and_then(self, end: asyncio.Event) -> None:
        while not end.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), COMMIT_SECONDS)
            await self.commit()

    async def commit(self, *, always: bool = False) -> None:
        """Makes durable what was written before; ``always`` also when nothing was handed over here. Cancelling waits
        for the disk."""
        async with self._lock:
            pieces, self._written, self._uncommitted_bytes = self._written, [], 0
            if pieces or always:
                await in_thread(self._copy.commit)
            for piece in pieces:
                self._missing.get(piece.tensor, set()).discard(piece)
            await self._check([tensor for tensor, missing in self._missing.items() if not missing])

    async def _check(self, tensors: list[str]) -> None:
        for tensor in tensors:
            del self._missing[tensor]
            if self._on_tensor is not None and not await in_thread(self._on_tensor, tensor):
                self._on_wrong(tensor)

"""One request's bytes on their way from a source to the disk, over as many connections as that takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing

from swarm.store.pieces import Piece
from swarm.store.request import Request
from swarm.store.sources.source import Source

OnPiece = Callable[[Piece, bytearray], Awaitable[None]]
OnBytes = Callable[[int], Awaitable[None]]


class Transfer:
    """Hands over each piece when it is whole. After a failure ``run`` goes on with the byte after the last one that the
    source gave. Holds a piece at most and a block of the source in memory."""

    def __init__(self, request: Request, on_piece: OnPiece, on_bytes: OnBytes) -> None:
        self._request = request
        self._on_piece = on_piece
        self._on_bytes = on_bytes
        self._next = 0  # the piece that is coming
        self._buffer = bytearray()

    @property
    def position(self) -> int:
        return self._piece.start + len(self._buffer)

    @property
    def _piece(self) -> Piece:
        return self._request.pieces[self._next]

    async def run(self, source: Source) -> None:
        """Raises ``SourceError``, ``Unavailable`` when it may be called again, and ``StoreError``."""
        if self._next == len(self._request.pieces):
            return
        async with aclosing(source.read(self._request.file, self.position, self._request.stop)) as blocks:
            async for block in blocks:
                await self._take(block)
                await self._on_bytes(len(block))

    async def _take(self, block: bytes) -> None:
        view = memoryview(block)
        while view:
            room = self._piece.bytes - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            if len(self._buffer) == self._piece.bytes:
                await self._on_piece(self._piece, self._buffer)
                self._next, self._buffer = self._next + 1, bytearray()

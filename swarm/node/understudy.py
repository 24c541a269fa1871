"""What an understudy holds: rows of a session that another hop computed, written layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from shim.errors import EngineDied, EngineError
from swarm.node.sessions import Session
from swarm.protocol import FrameStream


class Understudy:
    """Keeps ``session.position`` at what every layer of the run holds. ``stream`` is the one that feeds it.

    ``over`` once the session is an ordinary hop: whoever waited to write must not.
    """

    def __init__(self, session: Session, primary: str) -> None:
        self.primary = primary  # the peer that may write
        self.stream: FrameStream | None = None
        self.over = False
        self._session = session
        self._first = session.terms.run[0]
        self._held = [0] * (session.terms.run[1] - self._first)
        self._writes = asyncio.Lock()

    def holds(self, layer: int) -> bool:
        """Whether the layer is one of the run."""
        return 0 <= layer - self._first < len(self._held)

    def held(self, layer: int) -> int:
        """Positions that the layer holds."""
        return self._held[layer - self._first]

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One write at a time; entered, too, to wait for the last of them. Look at ``over`` inside, not before."""
        async with self._writes:
            yield

    @contextmanager
    def writing(self, layer: int, first: int, end: int) -> Iterator[None]:
        """Around the engine's call for rows [first, end). Calls reach the engine in order, so the layer counts as cut
        from the moment on that the call is handed over; a refusal has changed nothing."""
        before = self.held(layer)
        self._set(layer, min(before, first))
        try:
            yield
        except EngineDied:
            raise
        except EngineError:
            self._set(layer, before)
            raise
        self._set(layer, end)

    def _set(self, layer: int, end: int) -> None:
        self._held[layer - self._first] = end
        self._session.holds(min(self._held))

"""One machine's cable: a lane to it, a lane from it, and the connections that pass."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from contextlib import contextmanager

from bench.links.lane import Lane, Shape


class Direction(enum.Flag):
    """Seen from the machine whose cable it is."""

    UP = enum.auto()
    DOWN = enum.auto()
    BOTH = UP | DOWN


class Link:
    """Use it in one event loop. Every method but ``reset`` has its effect at once and does not wait."""

    def __init__(self, shape: Shape | None = None) -> None:
        self.up = Lane(shape, seed=1)
        self.down = Lane(shape, seed=2)
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def passed_bytes(self) -> int:
        return self.up.passed_bytes + self.down.passed_bytes

    def lanes(self, direction: Direction = Direction.BOTH) -> list[Lane]:
        pairs = ((Direction.UP, self.up), (Direction.DOWN, self.down))
        return [lane for which, lane in pairs if which in direction]

    def shape(self, shape: Shape, direction: Direction = Direction.BOTH) -> None:
        for lane in self.lanes(direction):
            lane.shape = shape

    def cut(self, direction: Direction = Direction.BOTH) -> None:
        """A pulled cable: nothing arrives and nothing ends, and a new connection is accepted and stays silent. The
        senders notice nothing until their buffers and the proxy's are full."""
        for lane in self.lanes(direction):
            lane.hold(cut=True)

    def half_open(self) -> None:
        """The end of either side, orderly or not, is kept from the other, which goes on sending to nobody."""
        for lane in self.lanes():
            lane.hold(half_open=True)

    def heal(self, direction: Direction = Direction.BOTH) -> None:
        """Lifts ``cut`` and ``half_open``; the shape stays."""
        for lane in self.lanes(direction):
            lane.hold(cut=False, half_open=False)

    async def reset(self) -> int:
        """RST to both sides of every connection, cut or not; new ones may come. How many there were, all gone now."""
        resetting = tuple(self._connections)
        for connection in resetting:
            connection.cancel()
        if resetting:
            await asyncio.wait(resetting)
        return len(resetting)

    @contextmanager
    def carrying(self, connection: asyncio.Task[None]) -> Iterator[None]:
        self._connections.add(connection)
        try:
            yield
        finally:
            self._connections.discard(connection)

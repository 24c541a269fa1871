"""What is on its way in one direction of one connection: in order, late as the lanes say, and bounded."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Sequence

from bench.links.lane import Lane

PIECE_BYTES = 64 << 10
SMALLEST_PIECE_BYTES = 1448  # what fits one packet
PIECE_SECONDS = 0.005  # a piece of a slow lane is small, so that others get their turn
AHEAD_SECONDS = 0.004  # a timer wakes up to 1 ms late: what is booked ahead keeps the lane busy meanwhile
UNLIMITED_WINDOW_BYTES = 8 << 20
SMALLEST_WINDOW_BYTES = 256 << 10


class End(enum.Enum):
    """How a connection's sender ended."""

    CLOSE = enum.auto()
    RESET = enum.auto()


class Line:
    """``put`` waits for the bandwidth and while the window is full; ``get`` waits until the next item has arrived."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._items: deque[tuple[float, bytes | End]] = deque()
        self._bytes = 0
        self._last_arrival = 0.0
        self._due: float | None = None  # when ``put`` would have returned, had its timer been exact
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def piece_bytes(self) -> int:
        """How much to put at once."""
        slowest = self._slowest()
        if slowest is None:
            return PIECE_BYTES
        return max(SMALLEST_PIECE_BYTES, min(PIECE_BYTES, int(slowest * PIECE_SECONDS)))

    @property
    def window_bytes(self) -> int:
        """How much may be on its way, delivered or not: twice what a slow line holds, so that it is never idle."""
        slowest = self._slowest()
        if slowest is None:
            return UNLIMITED_WINDOW_BYTES
        seconds = sum(lane.shape.delay_seconds + lane.shape.jitter_seconds for lane in self._lanes)
        return max(SMALLEST_WINDOW_BYTES, int(2 * slowest * seconds))

    async def put(self, item: bytes | End) -> None:
        n_bytes = _size(item)
        while self._bytes and self._bytes + n_bytes > self.window_bytes:
            self._room.clear()
            await self._room.wait()
            self._due = None
        now = self._loop.time()
        # A process that was woken late must not make the link slower: what waited is booked for when it was due.
        at = now if self._due is None else min(now, self._due)
        left = max(lane.book(n_bytes, at) for lane in self._lanes)
        arrival = left + sum(lane.draw_delay() for lane in self._lanes)
        self._last_arrival = max(self._last_arrival, arrival)
        self._items.append((self._last_arrival, item))
        self._bytes += n_bytes
        self._arrived.set()
        self._due = max(at, left - AHEAD_SECONDS)
        await asyncio.sleep(max(0.0, self._due - now))

    def sender_is_idle(self) -> None:
        """What is put next did not wait for the lanes."""
        self._due = None

    async def get(self) -> bytes | End:
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        arrival, item = self._items[0]
        await asyncio.sleep(max(0.0, arrival - self._loop.time()))
        await self.let_pass(is_end=isinstance(item, End))
        self._items.popleft()
        self._bytes -= _size(item)
        self._room.set()
        for lane in self._lanes:
            lane.passed_bytes += _size(item)
        return item

    async def let_pass(self, *, is_end: bool) -> None:
        """Returns when no lane holds bytes, or ends, back."""
        while (closed := next((lane for lane in self._lanes if lane.holds(is_end=is_end)), None)) is not None:
            await closed.changed()

    def _slowest(self) -> float | None:
        limits = [lane.shape.bytes_per_second for lane in self._lanes]
        return min((limit for limit in limits if limit is not None), default=None)


def _size(item: bytes | End) -> int:
    return len(item) if isinstance(item, bytes) else 0

"""One direction of a link: what every connection that passes it has in common."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """How a lane carries bytes. The delay is one way; jitter adds up to ``jitter_seconds`` and keeps the order."""

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    bytes_per_second: float | None = None  # None: as fast as the proxy can

    def __post_init__(self) -> None:
        given = (self.delay_seconds, self.jitter_seconds, self.bytes_per_second or 1.0)
        if not all(math.isfinite(value) and value >= 0 for value in given) or self.bytes_per_second == 0:
            raise ValueError(f"{self}: delays are 0 or more, bandwidth is above 0 or None")


class Lane:
    """The bandwidth of ``shape`` belongs to all connections together, as a bucket that holds no more than one piece.

    Bytes arrive never early and up to 1 ms late, the resolution of asyncio's timers. A new ``shape`` holds for bytes
    sent from then on. ``cut`` and ``half_open`` hold back: what is held arrives, in order, when they are lifted.
    """

    def __init__(self, shape: Shape | None = None, *, seed: int = 0) -> None:
        self.shape = shape or Shape()
        self.passed_bytes = 0
        self.is_cut = False
        self.is_half_open = False
        self._random = random.Random(seed)
        self._free_at = 0.0
        self._change = asyncio.Event()

    def book(self, n_bytes: int, now: float) -> float:
        """When the last of ``n_bytes`` has left the sender, on the clock of ``now``."""
        if self.shape.bytes_per_second is None:
            return now
        self._free_at = max(self._free_at, now) + n_bytes / self.shape.bytes_per_second
        return self._free_at

    def draw_delay(self) -> float:
        return self.shape.delay_seconds + self._random.uniform(0.0, self.shape.jitter_seconds)

    def holds(self, *, is_end: bool) -> bool:
        """Whether bytes, or the end of a connection, have to wait."""
        return self.is_cut or (is_end and self.is_half_open)

    def hold(self, *, cut: bool | None = None, half_open: bool | None = None) -> None:
        self.is_cut = self.is_cut if cut is None else cut
        self.is_half_open = self.is_half_open if half_open is None else half_open
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self) -> None:
        """Returns after the next ``hold``."""
        await self._change.wait()

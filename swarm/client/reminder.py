"""Why something is waited for, without a line for every look."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_SECONDS = 3.0


class Reminder:
    """Passes a line on when its reason is another than the last one's, and otherwise every few seconds."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._reason: str | None = None
        self._due = 0.0

    def forget(self) -> None:
        """What is waited for next is told at once."""
        self._reason = None

    def tell(self, line: str, reason: str) -> None:
        """``reason`` is what the line says beside the time that is left."""
        now = self._clock()
        if reason == self._reason and now < self._due:
            return
        self._reason, self._due = reason, now + EVERY_SECONDS
        self._tell(line)

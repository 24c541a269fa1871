"""How far a benchmark's preparations have come."""

from __future__ import annotations

import sys
import time


class Bar:
    """Progress on stderr: a line that is written over on a terminal, else one line every ten seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._every_seconds = 0.2 if sys.stderr.isatty() else 10.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last < self._every_seconds and done < total:
            return
        self._last = now
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        text = f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB"
        print(text, end=end, file=sys.stderr, flush=True)

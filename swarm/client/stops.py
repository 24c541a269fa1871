"""Stop strings in streamed text: what could still become one is held back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.errors import UsageError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True)
class StopFeed:
    """``text`` is safe to show; ``stop`` is the stop string that was met."""

    text: str
    stop: str | None = None


class StopStrings:
    """Cuts the text before the stop string that is complete first (of two that end together, the longer one).

    The result does not depend on how the text is split between calls.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if len(stops) > MAX_STOP_STRINGS:
            raise UsageError(f"{len(stops)} stop strings are too many; give at most {MAX_STOP_STRINGS}")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
                raise UsageError(
                    f"a stop string has {len(stop)} characters; give stop strings of 1 to {MAX_STOP_CHARACTERS}"
                )
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""

    def feed(self, text: str) -> StopFeed:
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, stop = min(hits)
            self._held = ""
            return StopFeed(text[:at], stop)
        keep = self._ambiguous(text)
        self._held = text[len(text) - keep :]
        return StopFeed(text[: len(text) - keep])

    def flush(self) -> str:
        """The text held back: nothing follows that could complete a stop string."""
        text, self._held = self._held, ""
        return text

    def _ambiguous(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        return max((overlap(text, stop) for stop in self._stops), default=0)


def overlap(text: str, stop: str) -> int:
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0

"""When a transfer that failed is tried again, and when it is given up."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tenacity import AsyncRetrying, AttemptManager, RetryCallState, retry_if_exception_type

from swarm.errors import SourceError
from swarm.store.sources.source import Unavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """Pauses grow from the first to the longest, about a minute in all, until ``tries`` in a row have brought nothing.
    A server that asks for a longer pause gets it, up to ``max_asked_seconds``."""

    tries: int = 8
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 20.0
    max_asked_seconds: float = 900.0


@dataclass
class Trying:
    """The tries of one transfer. ``progressed`` is called when bytes come, and starts the count again."""

    patience: Patience
    retries: int = 0
    _failures: int = field(default=0, init=False)

    def progressed(self) -> None:
        self._failures = 0

    async def attempts(self) -> AsyncIterator[AttemptManager]:
        """``async for attempt in trying.attempts(): with attempt: ...``. Raises ``SourceError`` in the end."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            after=self._failed,
            wait=self._pause,
            stop=self._given_up,
            before_sleep=self._say,
            retry_error_callback=self._raise,
        )
        async for attempt in retrying:
            yield attempt

    def _failed(self, _state: RetryCallState) -> None:
        self._failures += 1

    def _given_up(self, state: RetryCallState) -> bool:
        asked = _asked_seconds(state)
        return self._failures >= self.patience.tries or asked > self.patience.max_asked_seconds

    def _pause(self, state: RetryCallState) -> float:
        patience = self.patience
        grown = patience.first_pause_seconds * 2.0 ** min(self._failures - 1, 30)
        pause = min(grown, patience.longest_pause_seconds) * random.uniform(0.5, 1.0)
        return max(pause, _asked_seconds(state))

    def _say(self, state: RetryCallState) -> None:
        self.retries += 1
        pause = state.next_action.sleep if state.next_action is not None else 0.0
        # a lost connection is everyday: it is worth a line when the next one brought nothing either
        level = logging.INFO if self._failures < 2 else logging.WARNING
        log.log(level, "%s; trying again in %.0f s", _what(state), pause)

    def _raise(self, state: RetryCallState) -> None:
        asked = _asked_seconds(state)
        if asked > self.patience.max_asked_seconds:
            reason = f"it asks for a pause of {asked / 60:.0f} minutes"
            what_next = "what is here is kept, fetch again after that, or choose another --source"
        else:
            reason = f"{self._failures} tries in a row brought nothing"
            what_next = "what is here is kept, fetch again later, or choose another --source"
        raise SourceError(f"{_what(state)}; {reason}; {what_next}") from _error(state)


def _asked_seconds(state: RetryCallState) -> float:
    error = _error(state)
    return (error.retry_after_seconds or 0.0) if isinstance(error, Unavailable) else 0.0


def _what(state: RetryCallState) -> str:
    return str(_error(state)).rpartition("; ")[0]


def _error(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None

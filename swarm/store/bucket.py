"""A limit on bytes per second."""

from __future__ import annotations

_BURST_SECONDS = 0.25


class TokenBucket:
    """Tells how long to wait after bytes that came. It holds a quarter of a second's bytes, so the rate is kept also
    over short times; what is taken beyond that is waited for."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._tokens = 0.0  # below zero: bytes that are still to be paid with waiting
        self._at: float | None = None

    def take(self, n_bytes: int, now: float) -> float:
        """Seconds to wait before the next bytes are taken. ``now`` is a clock that never goes back."""
        passed = 0.0 if self._at is None else now - self._at
        self._at = now
        self._tokens = min(self._rate * _BURST_SECONDS, self._tokens + passed * self._rate) - n_bytes
        return max(0.0, -self._tokens / self._rate)

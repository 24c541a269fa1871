"""How often a peer may ask for something: a bucket that holds a minute's requests and fills up again at that pace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm.ids import PeerId
from swarm.node.config import Limits, PerMinute
from swarm.protocol import WireError, pb

MIN_RETRY_SECONDS = 0.1


class Bucket:
    """Starts full. Times are those of the caller's clock, in seconds."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = float(per_minute)
        self._per_second = per_minute / 60
        self._held = self._most
        self._at = now

    def wait_seconds(self, now: float) -> float:
        """Until one can be taken; 0 at best."""
        return max(0.0, (1 - self._filled(now)) / self._per_second)

    def take(self, now: float) -> None:
        self._held, self._at = self._filled(now) - 1, now

    def is_full(self, now: float) -> bool:
        return self._filled(now) >= self._most

    def _filled(self, now: float) -> float:
        return min(self._most, self._held + (now - self._at) * self._per_second)


class Rate:
    """``what`` is counted for each peer and for all together. A refused request costs nothing."""

    def __init__(self, what: str, limit: PerMinute, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._limit = limit
        self._clock = clock
        self._all = Bucket(limit.of_all, clock())
        self._peers: dict[PeerId, Bucket] = {}
        self._forget_at = 64

    def __len__(self) -> int:
        """Peers that are remembered."""
        return len(self._peers)

    def take(self, peer: PeerId) -> None:
        """Raises WireError, which says when to come back."""
        now = self._clock()
        bucket = self._peers.get(peer) or Bucket(self._limit.of_peer, now)
        self._check(bucket, now, f"at most {self._limit.of_peer} for one peer")
        self._check(self._all, now, f"at most {self._limit.of_all} for all peers")
        bucket.take(now)
        self._all.take(now)
        self._peers[peer] = bucket
        if len(self._peers) >= self._forget_at:
            self._forget(now)

    def _check(self, bucket: Bucket, now: float, limit: str) -> None:
        seconds = bucket.wait_seconds(now)
        if seconds > 0:
            seconds = max(seconds, MIN_RETRY_SECONDS)
            text = f"{self._what} a minute: {limit}, again in {seconds:.1f} s"
            raise WireError(pb.LIMIT_REACHED, text, retry_after_seconds=seconds)

    def _forget(self, now: float) -> None:
        """Those who could ask as often as one who never did. Looked for when their number has doubled."""
        self._peers = {peer: bucket for peer, bucket in self._peers.items() if not bucket.is_full(now)}
        self._forget_at = max(64, 2 * len(self._peers))


@dataclass(frozen=True)
class Rates:
    """Of one node."""

    opens: Rate
    rows: Rate
    copies: Rate
    questions: Rate
    pieces: Rate

    @classmethod
    def of(cls, limits: Limits, clock: Callable[[], float] = time.monotonic) -> Rates:
        return cls(
            Rate("sessions", limits.opens, clock),
            Rate("rows of logits", limits.rows, clock),
            Rate("copies of sessions", limits.copies, clock),
            Rate("questions", limits.questions, clock),
            Rate("pieces of the artifact", limits.pieces, clock),
        )

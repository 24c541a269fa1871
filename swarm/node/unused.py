"""Sessions whose clients are there, and compute nothing: they keep a slot that another may need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from swarm.protocol import WireError, pb


class Usable(Protocol):
    @property
    def idle_since(self) -> float | None:
        """When it computed last, None while it does."""


U = TypeVar("U", bound=Usable)


def unused(sessions: Iterable[U], seconds: float, now: float) -> list[U]:
    """Those that have computed nothing for ``seconds``, the longest first."""
    found = [(since, session) for session in sessions if (since := session.idle_since) is not None]
    found.sort(key=lambda pair: pair[0])
    return [session for since, session in found if now - since >= seconds]


def told(since: float | None, now: float, why: str) -> WireError:
    """The last word to the client, who may come back with all its tokens."""
    seconds = 0.0 if since is None else now - since
    return WireError(pb.UNKNOWN_SESSION, f"it computed nothing for {seconds:.0f} s and was ended: {why}")

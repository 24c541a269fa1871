"""What a node tells the person who started it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Reporter(Protocol):
    """Called from the event loop's thread, except ``progress``, which may come from another."""

    def line(self, text: str) -> None:
        """One line that stays."""

    def progress(self, what: str, fraction: float, *, n_bytes: int = 0) -> None:
        """How far a slow stage is, 0 to 1; 1 ends it. ``n_bytes`` are what the whole of it moves, for a rate."""

    def joined(self, addresses: Sequence[str]) -> None:
        """The node is on the network; the first address is the best one to give to others."""


class Silent:
    """A reporter for nodes inside other programs."""

    def line(self, text: str) -> None:
        pass

    def progress(self, what: str, fraction: float, *, n_bytes: int = 0) -> None:
        pass

    def joined(self, addresses: Sequence[str]) -> None:
        pass

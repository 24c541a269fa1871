"""Where the bytes of a model come from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from swarm.artifact.manifest import Manifest
from swarm.errors import SourceError


class Unavailable(SourceError):
    """What was asked for may come later: a lost connection, a busy server. ``retry_after_seconds`` is the pause that
    the server asks for, None when it names none. Every other ``SourceError`` is final."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Source(Protocol):
    """Serves byte ranges of a manifest's files, several at a time."""

    @property
    def name(self) -> str:
        """For messages; holds no password and no token."""

    async def open(self, manifest: Manifest) -> None:
        """Finds all files and compares their sizes; the second time it does nothing. Raises ``SourceError`` with the
        reason for which the source is refused."""

    def read(self, file: int, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Bytes [start, stop) of a file, all of them or ``SourceError`` after those that came. To close the generator
        early ends the transfer."""

    async def close(self) -> None:
        """Frees connections and files; no ``read`` may be running."""

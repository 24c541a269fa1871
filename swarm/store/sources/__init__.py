"""Where models are fetched from: a folder, an HTTP server, the hub."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from swarm.artifact.catalog import PINNED
from swarm.artifact.manifest import Manifest
from swarm.artifact.pinned_model import PinnedModel
from swarm.errors import UsageError
from swarm.store.source_text import HUB, checked_source
from swarm.store.sources.folder import FolderSource
from swarm.store.sources.http import HttpSource, HttpTimeouts
from swarm.store.sources.hub import hub_source
from swarm.store.sources.source import Source, Unavailable

__all__ = ["FolderSource", "HttpSource", "HttpTimeouts", "Source", "Unavailable", "open_source", "opened_source"]


def open_source(text: str, manifest: Manifest, *, timeouts: HttpTimeouts | None = None) -> Source:
    """The source that ``--source`` names; nothing is asked of it yet. Raises ``UsageError``."""
    pinned = next((each for each in PINNED.values() if each.artifact_id == manifest.artifact_id), None)
    names = [file.name for file in manifest.files]
    source = checked_source(text)
    if source == HUB:
        return hub_source(_on_hub(pinned, manifest).hub, names, timeouts)
    if "://" in source:
        return HttpSource.at(source, names, timeouts)
    return FolderSource(Path(source), pinned.hub.folder if pinned else "")


@asynccontextmanager
async def opened_source(
    text: str, manifest: Manifest, *, timeouts: HttpTimeouts | None = None
) -> AsyncIterator[Source]:
    """``open_source``, closed at the end. Whoever reads first opens it."""
    source = open_source(text, manifest, timeouts=timeouts)
    try:
        yield source
    finally:
        await source.close()


def _on_hub(pinned: PinnedModel | None, manifest: Manifest) -> PinnedModel:
    if pinned is None:
        names = ", ".join(PINNED)
        raise UsageError(
            f"--source {HUB}: no place there is pinned for {manifest.name}, only for {names}; name a folder or a server"
        )
    return pinned

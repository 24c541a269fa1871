"""The parts of a model that a node has on its disk: all of them, or those that it has fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from swarm.artifact import Manifest
from swarm.artifact.catalog import LocalModel, digests_of, open_model
from swarm.node.config import ModelOptions
from swarm.node.plan import Plan
from swarm.node.reporter import Reporter
from swarm.store.complete import hold_complete
from swarm.store.folder_lock import FolderLock
from swarm.store.in_thread import in_thread
from swarm.store.whole import kept_digests


class Parts(Protocol):
    """``folder`` has the files under the manifest's names."""

    manifest: Manifest
    folder: Path

    def missing_bytes(self, first: int, last: int, *, mtp: bool = False) -> int:
        """What would have to be fetched to serve layers [first, last)."""

    def room_bytes(self) -> int:
        """How much may be fetched now."""

    def held_spans(self) -> tuple[tuple[int, int], ...]:
        """Runs of layers that need no fetching; empty when there is nothing to prefer."""

    def intent(self, plan: Plan) -> str:
        """What ``get`` will do, in a line; empty when nothing is ever fetched."""

    def check_room(self, plan: Plan) -> None:
        """Raises StoreError when the disk can't take what is missing."""

    async def get(self, plan: Plan, reporter: Reporter) -> None:
        """Fetches what is missing of the plan's layers. Raises StoreError and SourceError. Cancelling it keeps what has
        arrived."""

    @property
    def right_digests(self) -> Mapping[str, str] | None:
        """Of all tensors by name, where the model is sealed."""

    def digest(self, tensor: str) -> str | None:
        """Of a tensor that is here, as it was when it came or was read; None when nobody has digested it."""

    async def close(self) -> None:
        """Idempotent."""


class WholeFiles:
    """Files that were put there by somebody else. Nothing is ever fetched."""

    def __init__(self, manifest: Manifest, folder: Path, lock: FolderLock | None = None) -> None:
        """``lock`` is released by ``close``."""
        self._lock = lock
        self.manifest = manifest
        self.folder = folder
        self._digests = kept_digests(manifest, folder)

    @classmethod
    async def open(cls, options: ModelOptions, reporter: Reporter) -> WholeFiles:
        """Hashes files that nobody knows, which takes a while; cancelling stops that."""
        cancelled = False

        def hashed(done: int, total: int) -> None:
            if cancelled:
                raise InterruptedError
            reporter.progress(f"hashing {options.path.name}", done / max(total, 1))

        try:
            copy = await asyncio.to_thread(open_model, LocalModel(options.path, options.name), hashed)
        finally:
            cancelled = True  # a thread can only be asked to stop
        lock = await in_thread(hold_complete, options.path.parent, copy.manifest)
        for remark in copy.remarks:
            reporter.line(remark)
        return cls(copy.manifest, options.path.parent, lock)

    def missing_bytes(self, first: int, last: int, *, mtp: bool = False) -> int:
        return 0

    def room_bytes(self) -> int:
        return 0

    def held_spans(self) -> tuple[tuple[int, int], ...]:
        return ()

    def intent(self, plan: Plan) -> str:
        return ""

    def check_room(self, plan: Plan) -> None:
        pass

    async def get(self, plan: Plan, reporter: Reporter) -> None:
        pass

    @property
    def right_digests(self) -> Mapping[str, str] | None:
        return digests_of(self.manifest.artifact_id)

    def digest(self, tensor: str) -> str | None:
        return self._digests.get(tensor)

    async def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

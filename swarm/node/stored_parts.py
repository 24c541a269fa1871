"""The parts of a model that this node fetches by itself, in a folder of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from swarm.artifact.memory import format_bytes
from swarm.errors import StoreError
from swarm.node.config import ModelOptions, StoreOptions
from swarm.node.parts import Parts, WholeFiles
from swarm.node.plan import Plan
from swarm.node.reporter import Reporter
from swarm.store.fetch import fetch
from swarm.store.in_thread import in_thread
from swarm.store.lists import tensor_check
from swarm.store.partial_copy import PartialCopy
from swarm.store.pieces import Piece, PieceTable
from swarm.store.room import check_free, free_bytes
from swarm.store.sources import open_source

WINDOWS = 1 << 14  # whose sums are kept: more than any model has


class StoredParts:
    """``copy`` is None where nothing may be written and nothing is there to be read."""

    def __init__(self, options: StoreOptions, copy: PartialCopy | None, *, mtp: bool) -> None:
        self.manifest = options.manifest
        self.folder = options.folder
        self._options = options
        self._copy = copy
        self._mtp = mtp
        self._table = PieceTable(self.manifest) if copy is None else copy.table
        self._missing_bytes: Callable[[int, int, bool], int]
        self._arrived_bytes = 0  # since what is missing was counted
        self._count()

    @classmethod
    async def open(cls, options: ModelOptions, reporter: Reporter) -> StoredParts:
        """Takes over files that somebody has put there, if they are the right ones; that reads them. Raises
        StoreError."""
        store = options.store
        assert store is not None
        reserve_bytes = store.disk_reserve_bytes
        copy = await in_thread(PartialCopy.open, store.folder, store.manifest, disk_reserve_bytes=reserve_bytes)
        try:
            for remark in copy.remarks:
                reporter.line(remark)
            for number in copy.unknown:
                await _adopt(copy, number, reporter)
        except BaseException:
            copy.close()
            raise
        return cls(store, copy, mtp=options.mtp)

    @classmethod
    async def look(cls, options: ModelOptions) -> StoredParts:
        """Without changing anything; ``get`` can't be used."""
        store = options.store
        assert store is not None
        is_there = await in_thread(store.folder.is_dir)
        copy = await in_thread(PartialCopy.look, store.folder, store.manifest) if is_there else None
        return cls(store, copy, mtp=options.mtp)

    def missing_bytes(self, first: int, last: int, *, mtp: bool = False) -> int:
        return self._missing_bytes(first, last, mtp)

    def room_bytes(self) -> int:
        """As it was when what is missing was counted: while parts arrive, the disk fills with what they are missing."""
        return free_bytes(_there(self.folder)) + self._arrived_bytes - self._options.disk_reserve_bytes

    def held_spans(self) -> tuple[tuple[int, int], ...]:
        cuts = self.manifest.cuts
        spans: list[tuple[int, int]] = []
        for first, last in pairwise(cuts):
            if self.missing_bytes(first, last) == 0:
                start = spans.pop()[0] if spans and spans[-1][1] == first else first
                spans.append((start, last))
        return tuple(spans)

    def intent(self, plan: Plan) -> str:
        missing, total = self._missing(plan), self.manifest.size_bytes
        held = sum(piece.bytes for piece in self._pieces(plan)) - missing
        if not missing:
            return f"everything for layers {plan.first}:{plan.last} is in {self.folder} already, {format_bytes(held)}"
        return (
            f"will fetch {format_bytes(missing)} of {format_bytes(total)} ({format_bytes(held)} are here already) from "
            f"{open_source(self._options.source, self.manifest).name} to {self.folder}, where "
            f"{format_bytes(max(0, self.room_bytes()))} may be taken"
        )

    def check_room(self, plan: Plan) -> None:
        if self._copy is None:
            check_free(_there(self.folder), self._missing(plan), self._options.disk_reserve_bytes)
        else:
            self._copy.check_room(self._pieces(plan))

    async def get(self, plan: Plan, reporter: Reporter) -> None:
        copy, options = self._copy, self._options
        assert copy is not None, "these parts are only looked at"
        what = f"fetching layers {plan.first}:{plan.last}"

        def progress(done: int, total: int) -> None:
            self._arrived_bytes = min(done, total)
            if total:
                reporter.progress(what, min(1.0, done / total), n_bytes=total)

        source = open_source(options.source, self.manifest)
        try:
            fetched = await fetch(
                copy,
                source,
                self._pieces(plan),
                limit_bytes_per_second=options.bytes_per_second,
                on_progress=progress,
                on_tensor=tensor_check(copy, options.digests),
            )
            await in_thread(copy.local_copy)
        finally:
            self._count()
            await source.close()
        if fetched.bytes:
            reporter.line(f"fetched {format_bytes(fetched.bytes)} in {fetched.seconds:.0f} s from {source.name}")

    @property
    def right_digests(self) -> Mapping[str, str] | None:
        return self._options.digests

    def digest(self, tensor: str) -> str | None:
        return None if self._copy is None else self._copy.tensor_digest(tensor)

    async def close(self) -> None:
        if self._copy is not None:
            await in_thread(self._copy.close)

    def _missing(self, plan: Plan) -> int:
        return self.missing_bytes(plan.first, plan.last, mtp=self._mtp)

    def _pieces(self, plan: Plan) -> Sequence[Piece]:
        return self._table.of_span(plan.first, plan.last, self._mtp)

    def _count(self) -> None:
        """Counts what is missing anew: a planner asks for thousands of windows, and each has thousands of pieces."""
        table, copy = self._table, self._copy
        of_tensor = {tensor.name: _lacks(copy, table.of_tensor(tensor.name)) for tensor in self.manifest.tensors}
        headers = _lacks(copy, table.headers())

        @lru_cache(WINDOWS)
        def missing_bytes(first: int, last: int, mtp: bool) -> int:
            tensors = self.manifest.span_tensors(first, last, mtp=mtp)
            return headers + sum(of_tensor[tensor.name] for tensor in tensors)

        self._missing_bytes = missing_bytes
        self._arrived_bytes = 0


async def open_parts(
    stack: AsyncExitStack, options: ModelOptions, reporter: Reporter, *, only_look: bool = False
) -> Parts:
    """Closed with ``stack``. Raises ArtifactError."""
    parts: Parts
    if options.store is None:
        parts = await WholeFiles.open(options, reporter)
    else:
        parts = await (StoredParts.look(options) if only_look else StoredParts.open(options, reporter))
    stack.push_async_callback(parts.close)
    return parts


def _lacks(copy: PartialCopy | None, pieces: Sequence[Piece]) -> int:
    return sum(piece.bytes for piece in (pieces if copy is None else copy.missing(pieces)))


async def _adopt(copy: PartialCopy, number: int, reporter: Reporter) -> None:
    """Cancelling stops the reading."""
    name, size = copy.path(number).name, copy.manifest.files[number].size_bytes
    done, cancelled = 0, False

    def read(n_bytes: int) -> None:
        nonlocal done
        if cancelled:
            raise InterruptedError
        done += n_bytes
        reporter.progress(f"reading {name}, which was here already", min(1.0, done / max(1, size)))

    try:
        await asyncio.to_thread(copy.adopt_whole, number, read)
    finally:
        cancelled = True


def _there(folder: Path) -> Path:
    """The folder, or the one in which it will be made."""
    try:
        return next(parent for parent in (folder, *folder.parents) if parent.exists())
    except (OSError, StopIteration) as error:
        raise StoreError(f"{folder}: can't be looked at ({error}); choose another --data-dir") from error

"""What is done for a span beside serving it: its weights are held in memory, what it takes is compared with the plan,
its speed is known, and the operator hears of it when the memory does not suffice."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
import psutil

from shim.errors import EngineError
from swarm.artifact import available_memory
from swarm.artifact.memory import processes_bytes
from swarm.errors import NotEnoughMemory
from swarm.node.config import Weights
from swarm.node.footprint import Footprint, beside_the_span
from swarm.node.measure import measure_speed
from swarm.node.paging import Paging, reads_of
from swarm.node.plan import Plan
from swarm.node.shared import Shared
from swarm.node.speed import Speed, SpeedCache, SpeedKey, cpu_cores, cpu_model
from swarm.node.weights import LockedWeights, OnDone, cache_warning, held_parts, read_in, span_ranges

if TYPE_CHECKING:
    from swarm.node.serving import Home

logger = logging.getLogger(__name__)

PAGING_SECONDS = 60.0  # between two looks at what the engine reads from disk


class Upkeep:
    """Of one span. ``hold`` before it is loaded, ``compare`` and ``find_speed`` before it serves, ``run`` while it
    does, and ``close`` in any case."""

    def __init__(self, home: Home, plan: Plan, shared: Shared) -> None:
        self._home = home
        self._plan = plan
        self._shared = shared
        self._locked: LockedWeights | None = None
        self._cache = SpeedCache(home.config.speed_folder or speed_folder())
        self._measured = False
        self._is_old = False  # what is announced was found by an earlier run, a while ago

    async def hold(self) -> None:
        """Locks or reads the weights, if the operator wants that. Raises NotEnoughMemory and NotAModel."""
        how, plan = self._home.config.model.weights, self._plan
        warning = cache_warning(plan.memory, available_memory())
        if warning and how == Weights.LOCKED:
            raise NotEnoughMemory(f"--weights locked: {warning.removeprefix('warning: ')}")
        if warning:
            self._home.reporter.line(warning)
        if how == Weights.MAPPED:
            return
        ranges = span_ranges(self._home.manifest, self._home.folder, *plan.span, mtp=self._home.config.model.mtp)
        parts = await asyncio.to_thread(held_parts, ranges)
        size = sum(part.size for part in parts)
        if how == Weights.LOCKED:
            self._locked = LockedWeights(parts)
            with self._told("locking weights", size) as on_done:
                await asyncio.to_thread(self._locked.lock, on_done)
        else:
            with self._told("reading weights", size) as on_done:
                await asyncio.to_thread(read_in, parts, on_done)

    async def compare(self) -> None:
        """Tells what is taken beside what was planned. To be asked before anything is computed."""
        info, worker = self._shared.host.info, self._shared.host.pid
        if worker is None:
            return
        processes = [os.getpid(), worker, *_daemons()]
        weights = frozenset(str((self._home.folder / file.name).resolve()) for file in self._home.manifest.files)
        own_bytes = await asyncio.to_thread(beside_the_span, processes, info, weights)
        if own_bytes is not None:
            own_planned = processes_bytes(self._home.manifest, chunk_tokens=0)
            Footprint(self._plan.memory, info, own_planned, own_bytes).log()

    async def find_speed(self) -> None:
        """What an earlier run has found, else measured now, with slot 0. Raises EngineError."""
        kept = await asyncio.to_thread(self._cache.get, self._key)
        if kept is None:
            await self._measure(0)
        else:
            self._note(kept)
            self._is_old = not await asyncio.to_thread(self._cache.is_fresh, self._key)
            logger.info("an earlier run found decode %.3g, prefill %.3g tokens/s", *astuple(kept))

    async def run(self) -> None:
        """Never returns; cancel it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._measure_in_quiet())
            tasks.create_task(self._watch_paging())

    async def close(self) -> None:
        """Keeps the speed for the next run. Idempotent."""
        locked, self._locked = self._locked, None
        if locked is not None:
            await asyncio.to_thread(locked.close)
        if self._measured:
            self._measured = False
            await asyncio.to_thread(self._cache.put, self._key, self._shared.speed)

    # --- speed

    @property
    def _key(self) -> SpeedKey:
        info = self._shared.host.info
        return SpeedKey(
            engine=info.numerics_id,
            cpu=cpu_model(),
            cores=cpu_cores(),
            threads=self._home.config.model.threads,
            artifact_id=self._home.manifest.artifact_id,
            first=info.first,
            last=info.last,
            mtp=info.n_mtp > 0,
        )

    async def _measure(self, slot: int) -> None:
        speed = await measure_speed(self._shared.host, slot)
        logger.info("measured decode %.3g, prefill %.3g tokens/s", *astuple(speed))
        self._note(speed)
        self._measured, self._is_old = True, False
        await asyncio.to_thread(self._cache.put, self._key, speed)

    def _note(self, speed: Speed) -> None:
        info = self._shared.host.info
        self._shared.tally.speed.measured(speed, info.last - info.first)

    async def _measure_in_quiet(self) -> None:
        """Once, where an earlier run's speed is announced. The slot that it takes must not be the only one."""
        slots = self._shared.table.slots
        while self._is_old and len(self._shared.host.info.slot_tokens) > 1:
            if not await self._is_quiet():
                continue
            slot = slots.book(1)  # nobody holds any, so there is one
            try:
                await self._measure(slot)
            except EngineError as error:
                logger.info("the speed could not be measured: %s", error)
            finally:
                slots.release(slot)
            self._shared.on_change()

    async def _is_quiet(self) -> bool:
        """Whether nothing ran, and nobody was there to run anything, for a while."""
        before = self._shared.tally.sessions
        await asyncio.sleep(self._home.config.timeouts.quiet_seconds)
        return is_idle(self._shared) and self._shared.tally.sessions == before

    # --- memory

    async def _watch_paging(self) -> None:
        paging = Paging(self._shared.host.info.weights_bytes)
        while True:
            await asyncio.sleep(PAGING_SECONDS)
            worker = self._shared.host.pid
            if worker is None:
                continue
            try:
                reads = reads_of(worker)
            except (OSError, ValueError, KeyError, IndexError):
                continue  # it has just died, or this system does not tell
            line = paging.look(self._shared.tally.tokens.total(), reads)
            if line is not None:
                self._home.reporter.line(line)

    @contextmanager
    def _told(self, what: str, size: int) -> Iterator[OnDone]:
        """Progress of a thread, which can only be asked to stop."""
        stopped = False

        def on_done(done: int) -> None:
            if stopped:
                raise InterruptedError
            self._home.reporter.progress(what, done / size if size else 1.0, n_bytes=size)

        try:
            yield on_done
        finally:
            stopped = True


def is_idle(shared: Shared) -> bool:
    """Whether no session is open, no slot is taken and the engine is there."""
    return not shared.lives and shared.queue == 0 and shared.table.slots.booked == 0 and shared.host.ready


def _daemons() -> list[int]:
    """This process's libp2p daemon; a program with several nodes has as many."""
    found = []
    for child in psutil.Process().children():
        try:
            if child.name().startswith("p2pd"):
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def speed_folder() -> Path:
    return Path(platformdirs.user_cache_dir("glm-swarm")) / "speed"

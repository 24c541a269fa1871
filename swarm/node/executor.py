"""Carries out the scheduler's calls on the engine and hands each session what is its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from shim.errors import ComputeError, EngineDied, EngineError, SlotFull, StepGap
from swarm.node.batch import assemble, separate
from swarm.node.engine_host import EngineHost
from swarm.node.live import Computed, Job
from swarm.node.scheduler import Work
from swarm.node.shared import engine_lost
from swarm.node.tally import Tally
from swarm.protocol import WireError, pb

logger = logging.getLogger(__name__)


class Executor:
    """``execute`` for ``Runner``."""

    def __init__(self, host: EngineHost, tally: Tally) -> None:
        self._host = host
        self._tally = tally

    async def __call__(self, call: tuple[Work[Job], ...]) -> None:
        jobs = [work.job for work in call]
        for job in jobs:
            job.live.begin(job)
        await self._compute(jobs)

    async def _compute(self, jobs: Sequence[Job]) -> None:
        """Also used for one job of a call that was refused as a whole, when its session may have ended meanwhile."""
        for job in jobs:
            if job.live.closed:
                job.live.finish(job, WireError(pb.UNKNOWN_SESSION, "the session has ended"))
        jobs = [job for job in jobs if not job.live.closed]
        if not jobs:
            return
        rows = [job.rows for job in jobs]
        batch, summaries = assemble(rows)
        try:
            result, ipc_seconds = await self._host.step(tuple(job.live.session.id for job in jobs), batch, summaries)
        except EngineDied as error:
            for job in jobs:
                job.live.finish(job, engine_lost(str(error), blamed=self._host.blames(job.live.session.id)))
        except ComputeError as error:
            logger.error("a step failed in the engine and its sessions were emptied: %s", error)
            _fail(jobs, WireError(pb.INTERNAL, f"the step failed in the engine ({error}) and the session was emptied"))
        except EngineError as error:
            await self._refused(jobs, error)
        else:
            now_us = time.monotonic_ns() // 1000
            steps = (job.received.step for job in jobs)
            n_layers = batch.run[1] - batch.run[0]
            self._tally.called(steps, len(batch.slot), n_layers, result.compute_seconds, ipc_seconds)
            for job, part in zip(jobs, separate(result, rows), strict=True):
                job.live.finish(job, Computed(part, ipc_seconds, len(batch.slot), len(jobs), now_us))

    async def _refused(self, jobs: Sequence[Job], error: EngineError) -> None:
        """Nothing was computed. One bad row must not cost its neighbours their step: each is tried alone."""
        if len(jobs) > 1:
            for job in jobs:
                await self._compute([job])
            return
        job = jobs[0]
        try:
            position = await self._host.position(job.rows.slot)
        except EngineDied:
            position = 0
        job.live.finish(job, _refusal(error, position))


def _refusal(error: EngineError, position: int) -> WireError:
    if isinstance(error, StepGap):
        return WireError(pb.GAP, str(error), position=position)
    if isinstance(error, SlotFull):
        return WireError(pb.CONTEXT_FULL, str(error), position=position)
    return WireError(pb.MALFORMED, f"the engine refuses the step: {error}", position=position)


def _fail(jobs: Sequence[Job], refusal: WireError) -> None:
    for job in jobs:
        job.live.finish(job, refusal)

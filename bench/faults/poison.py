"""An engine that dies of a certain step, as of a bug that only this input meets."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

from shim.types import StepBatch, StepResult, SummarySpec
from swarm.ids import SessionId
from swarm.node.shared import Shared

Step = Callable[[tuple[SessionId, ...], StepBatch, Sequence[SummarySpec]], Awaitable[tuple[StepResult, float]]]


class Poison:
    """Ends the engine's process in every call that has a row of a poisonous session at or above its position. The calls
    before have been answered then, and those behind have not begun."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._positions: dict[SessionId, int] = {}
        self._order = asyncio.Lock()
        self._calls: set[asyncio.Task[tuple[StepResult, float]]] = set()

    def add(self, session: SessionId, position: int) -> None:
        self._positions[session] = position

    def around(self, step: Step) -> Step:
        async def poisoned(
            sessions: tuple[SessionId, ...], batch: StepBatch, summaries: Sequence[SummarySpec]
        ) -> tuple[StepResult, float]:
            async with self._order:
                deadly = any(self._is_deadly(session, batch) for session in sessions)
                if deadly and self._calls:
                    await asyncio.wait(self._calls)
                pid = self._shared.host.pid if deadly else None
                if pid is not None:
                    os.kill(pid, signal.SIGSTOP)  # or it may be done before it is killed
                call = asyncio.ensure_future(step(sessions, batch, summaries))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                await asyncio.sleep(0)  # now it is handed over
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
            return await call

        return poisoned

    def _is_deadly(self, session: SessionId, batch: StepBatch) -> bool:
        live, position = self._shared.lives.get(session), self._positions.get(session)
        if live is None or position is None:
            return False
        return bool((batch.position[batch.slot == live.session.slot] >= position).any())

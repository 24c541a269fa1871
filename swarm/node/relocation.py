"""A serving node and the swarm around it: what its operator is told of the others, and its moves to other layers.

A move costs the clients nothing until it is certain: the new parts are fetched while the old layers are served, then
the rules are asked again. Then sessions are handed over, the old engine gives its memory back, and the new one is
loaded under the same peer id. Whatever fails, the old layers are served on, or again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dht.record import NodeState, SpanRecord
from shim.errors import EngineError
from swarm.errors import SwarmError
from swarm.node.completeness import Completeness
from swarm.node.network import Network
from swarm.node.parts import Parts
from swarm.node.plan import Plan, Planner
from swarm.node.reporter import Reporter
from swarm.node.serving import Serving
from swarm.node.translate import swarm_error
from swarm.placement.moving import Mover

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 16  # times the usual one between two looks


class Stage(Protocol):
    """The node, as far as a move concerns it."""

    @property
    def serving(self) -> Serving: ...

    async def serve(self, plan: Plan) -> None:
        """Puts the plan's layers into service, in place of what was closed. Raises EngineError and SwarmError."""


@dataclass
class Relocation:
    """``run`` it as a task while the node serves; cancelling it leaves what is served then."""

    stage: Stage
    network: Network
    parts: Parts
    planner: Planner
    reporter: Reporter
    show: Callable[[Plan], None]
    drain_seconds: float
    look_seconds: float
    completeness: Completeness = field(init=False)
    _failures: int = 0  # one after the other

    def __post_init__(self) -> None:
        self.completeness = Completeness(self.network.manifest)

    async def run(self, mover: Mover | None) -> None:
        """Moves when ``mover`` says so; without one it only tells the operator what the swarm lacks."""
        await self._records()
        due = time.monotonic() + self._pause(mover)
        while True:
            await asyncio.sleep(min(self.look_seconds, max(0.0, due - time.monotonic())))
            records = await self._records()
            if mover is not None and time.monotonic() >= due:
                await self._consider(mover, records)
                due = time.monotonic() + self._pause(mover)

    async def _records(self) -> Sequence[SpanRecord]:
        """Of a look at the swarm, whatever it is for: the operator hears what has changed."""
        records = await self.network.records()
        line = self.completeness.look(records)
        if line:
            self.reporter.line(line)
        return records

    def _pause(self, mover: Mover | None) -> float:
        """Longer after each move that could not be prepared: a source that is down is not asked every few minutes."""
        if mover is None:
            return float("inf")
        return mover.recheck_seconds(random.random()) * min(1 << self._failures, LONGEST_PAUSE)

    async def _consider(self, mover: Mover, records: Sequence[SpanRecord]) -> None:
        old = self.stage.serving
        plan = self._wanted(mover, records)
        if plan is None:
            return
        try:
            self.show(plan)
            if not await self._get(plan, mover):
                return
        except SwarmError as error:
            self._failures += 1
            self._off(plan, str(error))
            return
        self._failures = 0
        while not mover.may_switch(await self._records(), old.plan.span, plan.span, self._now()):
            await asyncio.sleep(self.look_seconds)
            if not self._is_wanted(plan, mover, await self._records()):
                return
        if not await self._move(old, plan):
            mover.failed(plan.span)
        mover.switched(self._now())  # also when it has failed: it has cost as much

    def _is_wanted(self, plan: Plan, mover: Mover, records: Sequence[SpanRecord]) -> bool:
        """Whether the move still makes sense; if not, the operator hears why."""
        if self.stage.serving.shared.state is not NodeState.ONLINE:
            self._off(plan, "the engine has ended and is started again")
            return False
        wanted = self._wanted(mover, records)
        if wanted is None or wanted.span != plan.span:
            self._off(plan, "the swarm has changed")
            return False
        return True

    def _off(self, plan: Plan, why: str) -> None:
        served = _text(self.stage.serving.plan)
        self.reporter.line(f"the move to layers {_text(plan)} is off, {served} are served on: {why}")

    def _wanted(self, mover: Mover, records: Sequence[SpanRecord]) -> Plan | None:
        old = self.stage.serving
        if old.shared.state is not NodeState.ONLINE:
            return None
        choice = mover.look(records, old.plan.span, self._now(), self.parts.held_spans())
        if choice is None:
            return None
        return self.planner.carried_out(choice, old.plan.contexts)

    async def _get(self, plan: Plan, mover: Mover) -> bool:
        """Fetches what the plan needs; False when it is not wanted any more."""
        fetching = asyncio.create_task(self.parts.get(plan, self.reporter))
        try:
            while True:
                await asyncio.wait({fetching}, timeout=self.look_seconds)
                if fetching.done():
                    await fetching
                    return True
                if not self._is_wanted(plan, mover, await self._records()):
                    return False
        finally:
            fetching.cancel()
            await asyncio.wait({fetching})

    async def _move(self, old: Serving, plan: Plan) -> bool:
        """False: the old layers are served again."""
        self.reporter.line(f"moving from layers {_text(old.plan)} to {_text(plan)}")
        await old.drain(self.drain_seconds)
        await old.close()
        moved = await self._serves(plan)
        if not moved:
            self.reporter.line(f"going back to layers {_text(old.plan)}")
            await self.stage.serve(old.plan)
        self.reporter.line(f"serving layers {_text(self.stage.serving.plan)}")
        return moved

    async def _serves(self, plan: Plan) -> bool:
        try:
            await self.stage.serve(plan)
        except EngineError as error:
            self.reporter.line(f"layers {_text(plan)} can't be served: {swarm_error(error)}")
        except SwarmError as error:
            self.reporter.line(f"layers {_text(plan)} can't be served: {error}")
        else:
            return True
        await self.stage.serving.close()
        return False

    def _now(self) -> float:
        return self.network.peer.clock()


def _text(plan: Plan) -> str:
    return f"{plan.first}:{plan.last}"

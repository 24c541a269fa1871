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
    _failed: set[tuple[int, int]] = field(default_factory=set)  # could not be loaded, and would not be the next time

    async def run(self, mover: Mover | None) -> None:
        """Moves when ``mover`` says so; without one it only tells the operator what the swarm lacks."""
        completeness = Completeness(self.network.manifest)
        completeness.look(await self.network.records())
        due = time.monotonic() + (mover.recheck_seconds(random.random()) if mover else float("inf"))
        while True:
            await asyncio.sleep(min(self.look_seconds, max(0.0, due - time.monotonic())))
            records = await self.network.records()
            line = completeness.look(records)
            if line:
                self.reporter.line(line)
            if mover is not None and time.monotonic() >= due:
                await self._consider(mover, records)
                due = time.monotonic() + mover.recheck_seconds(random.random())

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
            self.reporter.line(f"the move to layers {_text(plan)} is off, {_text(old.plan)} are served on: {error}")
            return
        while not mover.may_switch(await self.network.records(), old.plan.span, plan.span, self._now()):
            await asyncio.sleep(self.look_seconds)
            wanted = self._wanted(mover, await self.network.records())
            if wanted is None or wanted.span != plan.span:
                return
        await self._move(old, plan)
        mover.switched(self._now())  # also when it has failed: it has cost as much

    def _wanted(self, mover: Mover, records: Sequence[SpanRecord]) -> Plan | None:
        old = self.stage.serving
        if old.shared.state is not NodeState.ONLINE:
            return None
        choice = mover.look(records, old.plan.span, self._now(), self.parts.held_spans())
        if choice is None or (choice.first, choice.last) in self._failed:
            return None
        return self.planner.carried_out(choice, old.plan.contexts)

    async def _get(self, plan: Plan, mover: Mover) -> bool:
        """Fetches what the plan needs; False when the swarm has changed so that it is not wanted any more."""
        fetching = asyncio.create_task(self.parts.get(plan, self.reporter))
        try:
            while True:
                await asyncio.wait({fetching}, timeout=self.look_seconds)
                if fetching.done():
                    await fetching
                    return True
                wanted = self._wanted(mover, await self.network.records())
                if wanted is None or wanted.span != plan.span:
                    self.reporter.line(f"the swarm has changed: layers {_text(plan)} are not fetched any further")
                    return False
        finally:
            fetching.cancel()
            await asyncio.wait({fetching})

    async def _move(self, old: Serving, plan: Plan) -> None:
        self.reporter.line(f"moving from layers {_text(old.plan)} to {_text(plan)}")
        await old.drain(self.drain_seconds)
        await old.close()
        if not await self._serves(plan):
            self.reporter.line(f"going back to layers {_text(old.plan)}")
            await self.stage.serve(old.plan)
        self.reporter.line(f"serving layers {_text(self.stage.serving.plan)}")

    async def _serves(self, plan: Plan) -> bool:
        try:
            await self.stage.serve(plan)
        except EngineError as error:
            self.reporter.line(f"layers {_text(plan)} can't be served: {swarm_error(error)}")
        except SwarmError as error:
            self.reporter.line(f"layers {_text(plan)} can't be served: {error}")
        else:
            return True
        self._failed.add(plan.span)
        await self.stage.serving.close()
        return False

    def _now(self) -> float:
        return self.network.peer.clock()


def _text(plan: Plan) -> str:
    return f"{plan.first}:{plan.last}"

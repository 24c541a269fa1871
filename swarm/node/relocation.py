"""A serving node and the swarm around it: what its operator is told of the others, and its moves to other layers.

A move costs its clients nothing until it is certain: the new parts are fetched while the old layers are served, then the
rules are asked again, in front of everybody (the node announces that it leaves, and looks whether another one of its
layers' servers does the same). Then sessions are handed over, the old engine gives its memory back, and the new one is
loaded under the same peer id. Whatever fails, the old layers are served on, or again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dht.record import NodeState, SpanRecord
from shim.errors import EngineError
from swarm.errors import SwarmError
from swarm.moving import Mover
from swarm.node.completeness import Completeness
from swarm.node.network import Network
from swarm.node.parts import Parts
from swarm.node.plan import Plan, Planner
from swarm.node.reporter import Reporter
from swarm.node.serving import Serving
from swarm.node.translate import swarm_error

logger = logging.getLogger(__name__)


class Stage(Protocol):
    """The node, as far as a move concerns it."""

    @property
    def serving(self) -> Serving: ...

    async def serve(self, plan: Plan) -> None:
        """Puts the plan's layers into service, in place of those that were closed. Raises EngineError and SwarmError."""

    async def publish(self, state: NodeState | None = None) -> None:
        """Announces what is served, in its own state unless another one is given."""


@dataclass(frozen=True)
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

    async def run(self, mover: Mover | None) -> None:
        """Moves when ``mover`` says so; without one it only tells the operator what the swarm lacks."""
        completeness = Completeness(self.network.manifest)
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
        if old.shared.state is not NodeState.ONLINE:
            return
        choice = mover.look(records, old.plan.span, self._now(), self.parts.held_spans())
        if choice is None:
            return
        plan = self.planner.carried_out(choice, old.plan.contexts)
        try:
            self.show(plan)
            await self.parts.get(plan, self.reporter)
        except SwarmError as error:
            self.reporter.line(f"the move to layers {_text(plan)} is off, {_text(old.plan)} are served on: {error}")
            return
        if await self._is_allowed(mover, plan):
            await self._move(old, plan)
            mover.switched(self._now())

    async def _is_allowed(self, mover: Mover, plan: Plan) -> bool:
        """Waits for the moment; False when the move is no good idea any more."""
        while not await self._may_leave(mover, plan):
            await asyncio.sleep(self.look_seconds)
            old = self.stage.serving
            if old.shared.state is not NodeState.ONLINE:
                return False
            records = await self.network.records()
            choice = mover.look(records, old.plan.span, self._now(), self.parts.held_spans())
            if choice is None or (choice.first, choice.last) != plan.span:
                return False
        return True

    async def _may_leave(self, mover: Mover, plan: Plan) -> bool:
        """Whether the rules still say so, with everybody knowing that this node is about to leave. Those that leave at
        the same time see each other."""
        old = self.stage.serving.plan.span
        if not self._allows(mover, await self.network.records(), old, plan):
            return False
        await self.stage.publish(NodeState.DRAINING)
        if self._allows(mover, await self.network.records(), old, plan):
            return True
        await self.stage.publish()
        return False

    def _allows(self, mover: Mover, records: Sequence[SpanRecord], old: tuple[int, int], plan: Plan) -> bool:
        own = self.network.peer_id
        # the rules judge a node that is still in service
        records = [
            record.model_copy(update={"state": NodeState.ONLINE}) if record.peer_id == own else record
            for record in records
        ]
        return mover.may_switch(records, old, plan.span, self._now())

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
        await self.stage.serving.close()
        return False

    def _now(self) -> float:
        return self.network.peer.clock()


def _text(plan: Plan) -> str:
    return f"{plan.first}:{plan.last}"



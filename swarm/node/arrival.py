"""A node on its way to its layers: which ones, what it takes to have them, and whether they are still the right ones.

The idea against nodes that join at the same moment: each announces its choice, waits until those who chose before they
could read it must have announced theirs, and looks again. Of two that see each other, the one with the larger peer id
gives way. Whoever announced before a node made its choice is believed in any case.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dht.record import NodeState, SpanRecord
from swarm.node.config import Placing
from swarm.node.network import Network
from swarm.node.own_record import joining_record
from swarm.node.parts import Parts
from swarm.node.plan import Plan, Planner
from swarm.node.reporter import Reporter
from swarm.placement import coverage_of

ROUNDS = 8  # of giving way to others, after which a choice stands


@dataclass(frozen=True)
class Arrival:
    """``show`` tells the operator what a plan means, and raises when it can't be carried out."""

    network: Network
    planner: Planner
    parts: Parts
    placing: Placing
    reporter: Reporter
    public_name: str
    show: Callable[[Plan], None]

    async def choose(self) -> Plan:
        """By what the swarm lacks. Raises NotEnoughMemory and StoreError."""
        if not self.network.is_alone:
            await asyncio.sleep(random.uniform(0, self.placing.join_seconds))
        return self._chosen(await self.network.records())

    async def reach(self, plan: Plan) -> Plan:
        """Announces the plan, settles it with others that join, and fetches what it needs; both as often as the swarm
        changes. Returns the plan that it came to, which a given one does not differ from. Raises StoreError and
        SourceError; what was fetched stays."""
        while True:
            await self._announce(plan)
            if plan.choice is not None:
                plan = await self._settled(plan)
            better = await self._fetch(plan)
            if better is None:
                return plan
            plan = better

    def _chosen(self, records: Sequence[SpanRecord]) -> Plan:
        plan = self.planner.choose(records, self.network.peer_id)
        self.show(plan)
        return plan

    async def _announce(self, plan: Plan) -> None:
        network = self.network
        record = joining_record(network.manifest, plan, network.peer_id, network.addresses, self.public_name)
        await network.announcer.publish(record)

    async def _settled(self, plan: Plan) -> Plan:
        seen = _spans(self.network.view.snapshot.records)
        for _ in range(ROUNDS):
            if self.network.is_alone:
                return plan
            await asyncio.sleep(self.placing.settle_seconds)
            records = await self.network.records()
            heeded = without_rivals(records, seen, self.network.peer_id)
            if not self._lost_ground(heeded, seen):
                return plan
            seen = _spans(records)
            other = self.planner.choose(heeded, self.network.peer_id)
            if other.span == plan.span:
                return plan
            self.reporter.line(f"layers {plan.first}:{plan.last} are taken by another node that joins; choosing again")
            self.show(other)
            plan = other
            await self._announce(plan)
        return plan

    def _lost_ground(self, heeded: Sequence[SpanRecord], seen: frozenset[object]) -> bool:
        """Whether somebody to be heeded has come since the choice was made."""
        return any(_span(record) not in seen for record in heeded if record.peer_id != self.network.peer_id)

    async def _fetch(self, plan: Plan) -> Plan | None:
        """Returns a plan that has become clearly better meanwhile, None when this one is there."""
        if self.parts.missing_bytes(plan.first, plan.last, mtp=self.planner.options.mtp) == 0:
            await self.parts.get(plan, self.reporter)
            return None
        fetching = asyncio.create_task(self.parts.get(plan, self.reporter))
        try:
            while True:
                await asyncio.wait({fetching}, timeout=self.placing.look_seconds)
                if fetching.done():
                    await fetching
                better = None if plan.choice is None else await self._better(plan)
                if better is not None or fetching.done():
                    return better
        finally:
            fetching.cancel()
            await asyncio.wait({fetching})

    async def _better(self, plan: Plan) -> Plan | None:
        """Another plan that leaves fewer layers without a server: what has been fetched is worth less than that."""
        records, own = await self.network.records(), self.network.peer_id
        manifest = self.network.manifest
        others = coverage_of(records, manifest.cuts, manifest.artifact_id, without=own)
        other = self.planner.choose(records, own)
        if others.plus(*other.span).servers.count(0) >= others.plus(*plan.span).servers.count(0):
            return None
        self.reporter.line(f"the swarm has changed: layers {other.first}:{other.last} help it more now")
        self.show(other)
        return other


def without_rivals(
    records: Sequence[SpanRecord], seen: frozenset[object], peer_id: str
) -> list[SpanRecord]:
    """The records that ``peer_id`` must heed: those that join at the same moment under larger ids give way to it."""
    return [
        record
        for record in records
        if record.state is not NodeState.JOINING or record.peer_id <= peer_id or _span(record) in seen
    ]


def _spans(records: Sequence[SpanRecord]) -> frozenset[object]:
    return frozenset(map(_span, records))


def _span(record: SpanRecord) -> object:
    return record.peer_id, record.first, record.last

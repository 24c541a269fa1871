"""A node on its way to its layers: which ones, what it takes to have them, and whether they are still the right ones.

The idea against nodes that join at the same moment: each announces its choice, waits until those who chose before they
could read it must have announced theirs, and looks again; the rules say who gives way. Whoever had announced before a
node made its choice is believed in any case.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dht.record import NodeState, SpanRecord
from swarm.errors import SwarmError
from swarm.node.network import Network
from swarm.node.own_record import joining_record
from swarm.node.parts import Parts
from swarm.node.plan import Plan, Planner
from swarm.node.reporter import Reporter
from swarm.placement.moving import Mover

ROUNDS = 8  # of giving way to others, after which a choice stands


@dataclass(frozen=True)
class Arrival:
    """``show`` tells the operator what a plan means, and raises when it can't be carried out."""

    network: Network
    planner: Planner
    parts: Parts
    reporter: Reporter
    public_name: str
    show: Callable[[Plan], None]

    async def reach(self, plan: Plan, mover: Mover | None) -> Plan:
        """Announces the plan, settles it with others that join, and fetches what it needs; both as often as the swarm
        changes. Returns the plan that it came to; without ``mover``, the given one. Raises StoreError and SourceError;
        what was fetched stays."""
        while True:
            await self._announce(plan)
            if mover is not None:
                plan = await self._settled(plan, mover)
            other = await self._fetch(plan, mover)
            if other is None:
                return plan
            plan = other

    async def _announce(self, plan: Plan) -> None:
        network = self.network
        record = joining_record(network.manifest, plan, network.peer_id, network.addresses, self.public_name)
        await network.announcer.publish(record)

    async def _settled(self, plan: Plan, mover: Mover) -> Plan:
        seen = _spans(self.network.view.snapshot.records)
        for _ in range(ROUNDS):
            if self.network.is_alone:
                return plan
            await asyncio.sleep(mover.rules.second_look_seconds)
            records = await self.network.records()
            other = self._other(plan, mover, believed(records, seen))
            if other is None:
                return plan
            plan, seen = other, _spans(records)
            await self._announce(plan)
        return plan

    async def _fetch(self, plan: Plan, mover: Mover | None) -> Plan | None:
        """Returns a plan that has become better meanwhile, None when the parts of this one are there."""
        if self.parts.missing_bytes(*plan.span, mtp=self.planner.options.mtp) == 0:
            await self.parts.get(plan, self.reporter)
            return None
        seen = _spans(self.network.view.snapshot.records)
        fetching = asyncio.create_task(self.parts.get(plan, self.reporter))
        try:
            while True:
                await asyncio.wait({fetching}, timeout=_pause(mover))
                if fetching.done():
                    await fetching
                if mover is not None and not self.network.is_alone:
                    other = self._other(plan, mover, believed(await self.network.records(), seen))
                    if other is not None:
                        return other
                if fetching.done():
                    return None
        finally:
            fetching.cancel()
            await asyncio.wait({fetching})

    def _other(self, plan: Plan, mover: Mover, records: Sequence[SpanRecord]) -> Plan | None:
        choice = mover.look_again(records, plan.span, self.parts.held_spans())
        if choice is None or (choice.first, choice.last) == plan.span:
            return None
        self.reporter.line(f"the swarm has changed: layers {choice.first}:{choice.last} help it more now")
        other = self.planner.carried_out(choice, plan.contexts)
        try:
            self.show(other)
        except SwarmError as error:
            self.reporter.line(f"layers {plan.first}:{plan.last} are kept to, the others are out of reach: {error}")
            return None
        return other


def believed(records: Sequence[SpanRecord], seen: frozenset[object]) -> list[SpanRecord]:
    """The records, those of joiners that were ``seen`` when the own choice was made as if they were online: who came
    later must not take their layers from them, whoever gives way to whom."""
    return [
        record.model_copy(update={"state": NodeState.ONLINE})
        if record.state is NodeState.JOINING and _span(record) in seen
        else record
        for record in records
    ]


def _pause(mover: Mover | None) -> float | None:
    return None if mover is None else mover.recheck_seconds(random.random())


def _spans(records: Sequence[SpanRecord]) -> frozenset[object]:
    return frozenset(map(_span, records))


def _span(record: SpanRecord) -> object:
    return record.peer_id, record.first, record.last

"""The second look of a node that has announced its layers and has not begun to serve.

The idea: nodes that come at the same moment act as if they had come one after another, in an order all compute alike.
Each counts the joiners before it and takes for granted that those among them whose window another one has announced,
too, will go on to where this node would go in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from dht.record import NodeState, SpanRecord
from swarm.errors import NotEnoughMemory
from swarm.placement.choice import Choice, Coverage, Place, Span, choose_window, coverage_of, usable_records
from swarm.placement.turns import order


def better_choice(place: Place, records: Sequence[SpanRecord], span: Span, held: Sequence[Span] = ()) -> Choice | None:
    """A window that serves more of the layers nobody serves than the announced ``span``; None: there is none, stay.
    None as well when nothing fits any more, while what the announced one needs is on its way.

    When every layer will have a server as announced, all stay: of joiners that go to and fro for a slightly better
    place, none would ever serve."""
    announced = coverage_of(records, place.cuts, place.artifact_id, without=place.peer_id)
    if not announced.plus(*span).uncovered:
        return None
    coverage = _as_if_one_by_one(place, records)
    try:
        choice = choose_window(
            place.cuts, coverage, place.budget_bytes, place.cost, tie_break=place.peer_id, prefer=held
        )
    except NotEnoughMemory:
        return None
    return choice if _is_better(coverage, (choice.first, choice.last), span) else None


def _as_if_one_by_one(place: Place, records: Sequence[SpanRecord]) -> Coverage:
    usable = [it for it in usable_records(records, place.cuts, place.artifact_id) if it.peer_id != place.peer_id]
    joining = [record for record in usable if record.state is NodeState.JOINING]
    online = [record for record in usable if record.state is not NodeState.JOINING]
    coverage = coverage_of(online, place.cuts, place.artifact_id)
    earlier = [record for record in joining if order(record.peer_id) < order(place.peer_id)]
    cost = cache(place.cost_of_others)
    for record in sorted(earlier, key=lambda it: order(it.peer_id)):
        span = record.first, record.last
        # what it has announced is all that is known of its memory
        choice = choose_window(place.cuts, coverage, cost(*span), cost, tie_break=record.peer_id)
        moved = choice.first, choice.last
        coverage = coverage.plus(*(moved if _is_better(coverage, moved, span) else span))
    return coverage


def _is_better(coverage: Coverage, window: Span, than: Span) -> bool:
    weakest = min(coverage.servers)
    helped = coverage.servers[slice(*window)].count(weakest)
    return helped > coverage.servers[slice(*than)].count(weakest)

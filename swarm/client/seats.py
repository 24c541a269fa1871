"""The chain of a broken session as seats, some of them empty, and who may take those. Pure planning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dht.record import SpanRecord
from swarm.client.hop import Hop, HopPlace
from swarm.client.opening import place_of
from swarm.client.understudy import Understudy
from swarm.errors import ContextExceeded, NoRoute
from swarm.ids import PeerId
from swarm.routing import CLIENT, Edge, Gap, RouteRequest, route


@dataclass(frozen=True)
class Seat:
    """Layers of the chain. ``hop`` None: it is empty and ``place`` says who was there, or, after planning, who comes.
    ``numerics_id`` is that of the results so far, ``understudy`` what ``hop`` has been so far."""

    place: HopPlace
    numerics_id: str
    hop: Hop | None = None
    understudy: Understudy | None = None

    @property
    def layers(self) -> tuple[int, int]:
        return self.place.layers

    def emptied(self) -> Seat:
        return replace(self, hop=None, understudy=None)


def filled(seats: Sequence[Seat], records: Sequence[SpanRecord], request: RouteRequest) -> list[Seat]:
    """The chain with somebody for every empty seat; hops that are there stay where they are. Raises NoRoute and
    ContextExceeded. When that fails, a chain without any of those hops may be found where one of them serves more."""
    try:
        return _filled(seats, records, request)
    except (NoRoute, ContextExceeded) as error:
        if all(seat.hop is None for seat in seats):
            raise
        try:
            return _filled([seat.emptied() for seat in seats], _with_own_slots(seats, records, request), request)
        except (NoRoute, ContextExceeded):
            raise error from None


def stand_ins(
    seats: Sequence[Seat], index: int, records: Sequence[SpanRecord], request: RouteRequest
) -> list[HopPlace]:
    """Who could take the layers of one hop while all others stay. Raises NoRoute and ContextExceeded."""
    without = [seat.emptied() if at == index else seat for at, seat in enumerate(seats)]
    others = [record for record in records if record.peer_id != seats[index].place.peer_id]
    return [seat.place for seat in _filled(without, others, request) if seat.hop is None]


def with_understudies(seats: Sequence[Seat], understudies: Sequence[Understudy]) -> list[Seat]:
    """In every empty seat those that wait for it, when they cover it."""
    chain: list[Seat] = []
    for seat in seats:
        waiting = [one for one in understudies if one.primary == seat.place.peer_id] if seat.hop is None else []
        edges = [one.hop.place.layers for one in waiting]
        ends = [seat.layers[0], *(last for _, last in edges)]
        fit = waiting and ends[-1] == seat.layers[1] and [first for first, _ in edges] == ends[:-1]
        chain += [Seat(one.hop.place, one.hop.numerics_id, one.hop, one) for one in waiting] if fit else [seat]
    return chain


def with_retained(seats: Sequence[Seat], retained: Sequence[Seat]) -> list[Seat]:
    """Those back in their seats that were to be replaced, where nobody has come and they are still well."""
    chain = list(seats)
    for old in retained:
        first, last = old.layers
        inside = [at for at, seat in enumerate(chain) if first <= seat.layers[0] and seat.layers[1] <= last]
        spans = inside and (chain[inside[0]].layers[0], chain[inside[-1]].layers[1]) == old.layers
        gone = old.hop is None or old.hop.failure is not None
        if spans and not gone and all(chain[at].hop is None for at in inside):
            chain[inside[0] : inside[-1] + 1] = [old]
    return chain


def without_broken_links(seats: Sequence[Seat], edges: frozenset[Edge]) -> list[Seat]:
    """Empties the seat behind every link that can't be used."""
    kept: list[Seat] = []
    for seat in seats:
        before = kept[-1] if kept else None
        both_stay = before is not None and before.hop is not None and seat.hop is not None
        broken = both_stay and before is not None and (before.place.peer_id, seat.place.peer_id) in edges
        kept.append(seat.emptied() if broken else seat)
    return kept


def _filled(seats: Sequence[Seat], records: Sequence[SpanRecord], request: RouteRequest) -> list[Seat]:
    used = {seat.place.peer_id for seat in seats if seat.hop is not None}
    chain: list[Seat] = []
    for gap, group in _gaps(seats):
        if gap is None:
            chain += group
            continue
        asked = replace(request, gap=gap, numerics_id=group[0].numerics_id or None)
        # a node knows a session by its id, so it can't be in a chain twice
        found = route([record for record in records if record.peer_id not in used], asked)
        used |= {PeerId(hop.peer_id) for hop in found.hops}
        chain += [Seat(place_of(hop, 0), hop.record.numerics_id) for hop in found.hops]
    return [replace(seat, place=replace(seat.place, index=index)) for index, seat in enumerate(chain)]


def _gaps(seats: Sequence[Seat]) -> Iterator[tuple[Gap | None, list[Seat]]]:
    """Runs of empty seats with the gap they leave, and of others with None."""
    before = CLIENT
    groups = [list(group) for _, group in groupby(seats, key=lambda seat: seat.hop is None)]
    for index, group in enumerate(groups):
        if group[0].hop is not None:
            before = group[-1].place.peer_id
            yield None, group
            continue
        after = groups[index + 1][0].place.peer_id if index + 1 < len(groups) else CLIENT
        yield Gap(group[0].layers[0], group[-1].layers[1], before, after), group


def _with_own_slots(
    seats: Sequence[Seat], records: Sequence[SpanRecord], request: RouteRequest
) -> Sequence[SpanRecord]:
    """Records in which the slots that this very session holds count as free: opening it anew takes the same ones."""
    own = {seat.place.peer_id for seat in seats if seat.hop is not None}
    return [_with_a_slot_more(record, request) if record.peer_id in own else record for record in records]


def _with_a_slot_more(record: SpanRecord, request: RouteRequest) -> SpanRecord:
    slots = tuple(
        slot.model_copy(update={"free": slot.free + 1})
        if slot.free < slot.total and slot.tokens >= request.context_tokens
        else slot
        for slot in record.slots
    )
    return record.model_copy(update={"slots": slots})

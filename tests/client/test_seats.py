"""Who takes the empty seats of a chain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from swarm.client.hop import Hop, HopPlace
from swarm.client.seats import Seat, filled, stand_ins, with_retained, with_understudies, without_broken_links
from swarm.client.understudy import Understudy
from swarm.errors import NoRoute, PeerFailed
from swarm.ids import PeerId
from swarm.routing import RouteRequest
from tests.routing.records import ARTIFACT, CUTS, NUMERICS, record, slots

REQUEST = RouteRequest(legal_cuts=CUTS, artifact_id=ARTIFACT, context_tokens=100)


def seats(*parts: tuple[str, int, int, bool]) -> list[Seat]:
    """(peer, first, last, whether it stays)."""
    stays = cast(Hop, object())
    return [
        Seat(HopPlace(index, PeerId(peer), (first, last)), NUMERICS, stays if there else None)
        for index, (peer, first, last, there) in enumerate(parts)
    ]


def told(chain: list[Seat]) -> list[tuple[str, int, int, bool]]:
    assert [seat.place.index for seat in chain] == list(range(len(chain)))
    return [(seat.place.peer_id, *seat.layers, seat.hop is not None) for seat in chain]


def test_only_the_empty_seat_is_taken() -> None:
    broken = seats(("a", 0, 3, True), ("b", 3, 7, False), ("c", 7, 10, True))
    records = [record("a", 0, 7), record("d", 3, 7, decode_tokens_per_second=1), record("e", 0, 10)]
    chain = filled(broken, records, REQUEST)
    assert told(chain)[0] == ("a", 0, 3, True) and told(chain)[-1] == ("c", 7, 10, True)
    assert "a" not in [peer for peer, *_ in told(chain)[1:]]


def test_neighbours_that_are_lost_together_are_replaced_together() -> None:
    broken = seats(("a", 0, 3, False), ("b", 3, 7, False), ("c", 7, 10, True))
    assert told(filled(broken, [record("e", 0, 10)], REQUEST)) == [("e", 0, 7, False), ("c", 7, 10, True)]


def test_one_peer_is_in_a_chain_once() -> None:
    broken = seats(("a", 0, 3, False), ("b", 3, 7, True), ("c", 7, 10, False))
    records = [record("e", 0, 10), record("f", 7, 10, decode_tokens_per_second=1)]
    assert [peer for peer, *_ in told(filled(broken, records, REQUEST))] == ["e", "b", "f"]


def test_one_that_stays_may_take_over_all_when_nobody_else_can() -> None:
    """Its only slot is the one that this session holds."""
    broken = seats(("a", 0, 3, True), ("b", 3, 10, False))
    records = [record("a", 0, 10, slots=slots((4096, 1, 0)))]
    assert told(filled(broken, records, REQUEST)) == [("a", 0, 10, False)]


def test_what_is_missing_is_the_gap() -> None:
    broken = seats(("a", 0, 3, True), ("b", 3, 7, False), ("c", 7, 10, True))
    with pytest.raises(NoRoute, match="no peer serves layers 3:7"):
        filled(broken, [record("a", 0, 3), record("c", 7, 10)], REQUEST)


def test_behind_a_broken_link_somebody_else_is_needed() -> None:
    chain = seats(("a", 0, 3, True), ("b", 3, 7, True), ("c", 7, 10, True))
    left = without_broken_links(chain, frozenset({("a", "b"), ("b", "c"), ("c", "a")}))
    assert [seat.hop is not None for seat in left] == [True, False, True]
    assert without_broken_links(chain, frozenset({("b", "a")})) == chain


def understudy(peer: str, primary: str, first: int, last: int) -> Understudy:
    hop = SimpleNamespace(place=HopPlace(0, PeerId(peer), (first, last)), numerics_id=NUMERICS, failure=None)
    return Understudy(cast(Hop, hop), PeerId(primary), lambda: None, lambda: None)


def test_those_that_wait_take_the_empty_seats_they_cover() -> None:
    broken = seats(("a", 0, 3, False), ("b", 3, 7, False), ("c", 7, 10, True))
    waiting = [understudy("d", "b", 3, 5), understudy("e", "b", 5, 7), understudy("f", "c", 7, 10)]
    chain = with_understudies(broken, waiting)
    assert [(seat.place.peer_id, seat.layers) for seat in chain] == [
        ("a", (0, 3)),
        ("d", (3, 5)),
        ("e", (5, 7)),
        ("c", (7, 10)),
    ]
    assert [seat.understudy for seat in chain] == [None, waiting[0], waiting[1], None]
    assert told(filled(chain, [record("g", 0, 10)], REQUEST))[0] == ("g", 0, 3, False)


@pytest.mark.parametrize("layers", [[(3, 5)], [(5, 7)], [(3, 4), (5, 7)], [(3, 8)]])
def test_a_part_of_a_seat_is_not_enough(layers: list[tuple[int, int]]) -> None:
    broken = seats(("a", 0, 3, True), ("b", 3, 7, False), ("c", 7, 10, True))
    waiting = [understudy(f"d{at}", "b", *part) for at, part in enumerate(layers)]
    assert with_understudies(broken, waiting) == broken


def test_a_hop_that_was_to_go_comes_back_where_nobody_has_come() -> None:
    chain = seats(("a", 0, 3, True), ("b", 3, 7, True), ("c", 7, 10, True))
    old = chain[1]
    old = Seat(old.place, old.numerics_id, cast(Hop, SimpleNamespace(failure=None)))
    nobody = seats(("a", 0, 3, True), ("d", 3, 5, False), ("e", 5, 7, False), ("c", 7, 10, True))
    assert with_retained(nobody, [old]) == [nobody[0], old, nobody[3]]
    somebody = seats(("a", 0, 3, True), ("d", 3, 5, True), ("e", 5, 7, False), ("c", 7, 10, True))
    assert with_retained(somebody, [old]) == somebody
    lost = Seat(old.place, old.numerics_id, cast(Hop, SimpleNamespace(failure=PeerFailed("gone"))))
    assert with_retained(nobody, [lost]) == nobody


def test_who_stands_in_for_a_hop_is_none_of_its_chain() -> None:
    chain = seats(("a", 0, 3, True), ("b", 3, 7, True), ("c", 7, 10, True))
    records = [record(peer, 0, 10) for peer in "abc"]
    with pytest.raises(NoRoute):
        stand_ins(chain, 1, records, REQUEST)
    (place,) = stand_ins(chain, 1, [*records, record("d", 0, 7)], REQUEST)
    assert (place.peer_id, place.layers, place.index) == ("d", (3, 7), 1)

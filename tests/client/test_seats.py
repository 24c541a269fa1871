"""Who takes the empty seats of a chain."""

from __future__ import annotations

from typing import cast

import pytest

from swarm.client.hop import Hop, HopPlace
from swarm.client.seats import Seat, filled, without_broken_links
from swarm.errors import NoRoute
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

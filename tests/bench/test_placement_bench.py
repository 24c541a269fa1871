from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from bench.placement import GIB, HOUR, HURRIED, Scenario, crowded, one_by_one, plans, simulate
from dht.record import NodeState, SpanRecord
from swarm.placement.choice import Span
from swarm.placement.turns import Turns

MEGABIT_100 = 12.5e6


def test_plans_fit_and_load_no_machine_more_than_needed() -> None:
    figures, lines = plans()
    assert lines[0].startswith("5x64: 0-17|18-33|34-49|50-65|66-77, largest ratio 0.67")
    assert lines[1].startswith("3x96: 0-29|30-53|54-77, largest ratio 0.73")
    assert figures["224 GiB as 2: GiB left"] > 0
    assert "224 GiB as 7, slots 4x4096: no plan, layers without a machine: ((74, 78),)" in lines
    assert figures["224 GiB as 7: largest weights/memory ratio"] < 1


def test_joins_in_any_order_cover_what_a_plan_covers_with_a_tenth_less() -> None:
    assert one_by_one(20) == {"swarms": 20, "incomplete": 0}


@pytest.mark.parametrize("seed", [1, 2])
def test_five_machines_find_their_places_and_a_spare_heals_the_swarm(seed: int) -> None:
    machines = Scenario([64] * 6, 9, deaths=(4 * HOUR,))
    figures = simulate(machines, seed, MEGABIT_100)
    slowest = 64 * GIB / MEGABIT_100 / 60  # minutes to fill one machine
    assert 0 < figures["covered_minutes"] < slowest + 15
    assert figures["weakest_servers_at_end"] >= 1
    assert figures["layers_bared_by_moves"] == 0
    assert figures["longest_heal_minutes"] < 2 * slowest


class Careless(Turns):
    """Goes when somebody else seems to be there."""

    def may_leave(
        self, peer_id: str, span: Span, layers: Iterable[int], records: Sequence[SpanRecord], now: float
    ) -> bool:
        others = [it for it in records if it.peer_id != peer_id and it.state is NodeState.ONLINE]
        return all(any(it.first <= layer < it.last for it in others) for layer in layers)


def test_movers_at_the_same_time_leave_nothing_bare() -> None:
    figures = crowded(1, MEGABIT_100, HURRIED)
    assert figures["moves_per_hour"] * 12 >= 20
    assert figures["layers_bared_by_moves"] == 0
    # it is the turns that see to it
    assert crowded(1, MEGABIT_100, replace(HURRIED, turns=Careless()))["layers_bared_by_moves"] > 0

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.placement.choice import Coverage
from swarm.placement.fleet import plan_swarm
from tests.placement.test_placement import MIB, per_layer, with_ends
from tests.routing.records import CUTS, GLM_CUTS, N_LAYERS


def test_a_plan_loads_machines_in_proportion() -> None:
    plan = plan_swarm(CUTS, {"big": 12 * MIB, "small": 1 * MIB}, per_layer)
    assert plan.chains == ((("big", 0, 10),),)  # another hop for one layer of ten is not worth it
    assert plan.support[0][0] == "small"
    plan = plan_swarm(CUTS, {"big": 9 * MIB, "small": 5 * MIB}, per_layer)
    assert plan.spans == (("big", 0, 7), ("small", 7, 10))  # 7 of 9 and 3 of 5: 6 and 4 would fill the small one
    assert plan.uncovered == ()


def test_further_machines_support_the_weakest_layers() -> None:
    plan = plan_swarm(CUTS, {"a": 6 * MIB, "b": 5 * MIB, "c": 5 * MIB, "d": 5 * MIB}, per_layer)
    coverage = Coverage.empty(N_LAYERS)
    for _, first, last in plan.spans:
        coverage = coverage.plus(first, last)
    assert len(plan.spans) == 4
    assert min(coverage.servers) == 2


def test_machines_that_are_too_small_together_cover_what_they_can() -> None:
    plan = plan_swarm(GLM_CUTS, {"a": 4 * MIB, "b": 1 * MIB, "c": 0}, per_layer)
    assert {name for name, _, _ in plan.spans} == {"a", "b"}
    assert plan.idle == ("c",)
    assert plan.spans == (("a", 0, 2), ("b", 0, 1))  # neither has room for 2:6 behind it


@settings(max_examples=150, deadline=None)
@given(layers=st.lists(st.integers(0, 12), min_size=1, max_size=6), cuts=st.sampled_from([CUTS, GLM_CUTS]))
def test_plans_keep_to_cuts_and_memory(layers: list[int], cuts: tuple[int, ...]) -> None:
    budgets = {f"m{number}": size * MIB for number, size in enumerate(layers)}
    plan = plan_swarm(cuts, budgets, with_ends)
    assert {name for name, _, _ in plan.spans} | set(plan.idle) == set(budgets)
    for name, first, last in plan.spans:
        assert first in cuts
        assert last in cuts
        assert with_ends(first, last) <= budgets[name]
    covered = {layer for _, first, last in plan.spans for layer in range(first, last)}
    holes = {layer for first, last in plan.uncovered for layer in range(first, last)}
    assert covered | holes == set(range(N_LAYERS))
    assert not covered & holes

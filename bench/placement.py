"""Who would serve which layers of GLM-5.2: plans for known machines, and simulated swarms of strangers.

Sizes are the pinned manifest's, memory the node's own sum (weights, KV of the default slots, compute, journal,
reserve); a machine offers its memory less 1 GiB for its system. The simulation is ``bench/simulated_swarm.py``: no
model is loaded, nothing is downloaded, and times are simulated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random

from bench.record import Record, this_commit, this_machine
from bench.simulated_swarm import Cause, SimulatedSwarm, World
from dht.record import NodeState, SpanRecord
from swarm.artifact.catalog import GLM52
from swarm.errors import NotEnoughMemory
from swarm.node.config import ModelOptions
from swarm.node.plan import Contexts, Planner
from swarm.node.slots import default_slots
from swarm.placement.choice import Cost, Coverage, choose_span, choose_window, largest_windows
from swarm.placement.fleet import largest_ratio, plan_swarm
from swarm.placement.moving import Mover, MoveRules

GIB = 1 << 30
HOUR = 3600.0
MANIFEST = GLM52.manifest
CUTS = MANIFEST.cuts
MIXED_GIB = (16, 24, 32, 48, 64, 96, 128)
SYSTEM_BYTES = GIB


@cache
def costs(memory_bytes: int) -> Cost:
    """A node's sum for the first of the default slots with which any window fits."""
    candidates = list(default_slots(MANIFEST.n_ctx_train))
    for contexts in candidates:
        cost = _cost(contexts)
        if largest_windows(CUTS, memory_bytes, cost):
            return cost
    return _cost(candidates[-1])


@cache
def _cost(contexts: Contexts) -> Cost:
    planner = Planner(MANIFEST, ModelOptions(Path(GLM52.name)), 0)
    return cache(planner.place(contexts, "").cost)


@cache
def weights(first: int, last: int) -> int:
    return MANIFEST.span_bytes(first, last)


@dataclass(frozen=True)
class Scenario:
    """Machines in GiB, when they start, how long they are watched, and when one of the weakest layer's servers dies."""

    machines: Sequence[int]
    hours: float
    spread_seconds: float = 0.0
    deaths: Sequence[float] = ()  # seconds
    life_hours: float = 0.0  # of a machine on average, others coming in their place; 0: none dies by chance


def simulate(scenario: Scenario, seed: int, bytes_per_second: float) -> dict[str, float]:
    swarm = SimulatedSwarm(World(CUTS, MANIFEST.artifact_id, weights, costs, bytes_per_second, MoveRules()), seed)
    random = swarm.random

    def start(gib: int, at: float) -> None:
        name = swarm.start_node(gib * GIB - SYSTEM_BYTES, at)
        if scenario.life_hours:
            ends = at + random.expovariate(1 / (scenario.life_hours * HOUR))
            swarm.at(ends, lambda: _replaced(name, ends))

    def _replaced(name: str, now: float) -> None:
        swarm.kill(name)
        start(random.choice(list(scenario.machines)), now)

    for gib in scenario.machines:
        start(gib, random.uniform(0, scenario.spread_seconds))
    for at in scenario.deaths:
        swarm.at(at, swarm.kill_weakest)
    swarm.run(scenario.hours * HOUR)
    return _summed_up(swarm, scenario.hours)


HURRIED = MoveRules(balance_turn_seconds=600, dwell_seconds=0, at_once=1.0)  # all go that could


def crowded(seed: int, bytes_per_second: float, rules: MoveRules) -> dict[str, float]:
    """Thirty servers of the first layers, two of each of the others."""
    swarm = SimulatedSwarm(World(CUTS, MANIFEST.artifact_id, weights, costs, bytes_per_second, rules), seed)
    memory = 64 * GIB - SYSTEM_BYTES
    for span, servers in (((0, 18), 30), ((18, 34), 2), ((34, 50), 2), ((50, 66), 2), ((66, 78), 2)):
        for _ in range(servers):
            swarm.start_node(memory, span=span)
    swarm.run(12 * HOUR)
    return _summed_up(swarm, 12)


def _summed_up(swarm: SimulatedSwarm, hours: float) -> dict[str, float]:
    measured = swarm.measured
    seconds = sum(measured.fewest.values()) or 1
    heals = [until - since for _, since, until, cause in measured.uncovered if cause is Cause.DEATH]
    return {
        "covered_minutes": -1.0 if measured.covered_at is None else measured.covered_at / 60,
        "weakest_servers_at_end": min(swarm.servers),
        "share_of_time_complete": 1 - measured.fewest[0] / seconds,
        "moves_per_hour": len(measured.moves) / hours,
        "moves_given_up": measured.given_up,
        "layers_bared_by_moves": measured.bare_by_move,
        "longest_heal_minutes": max(heals, default=0.0) / 60,
        "fetched_gib": measured.fetched_bytes / GIB,
    }


def scenarios(mixed: int) -> dict[str, Scenario]:
    volunteers = Random(7).choices(MIXED_GIB, k=mixed)
    return {
        "5x64": Scenario([64] * 5, 8),
        "5x64 and a spare, one dies": Scenario([64] * 6, 10, deaths=(4 * HOUR,)),
        "3x96": Scenario([96] * 3, 8),
        "3x128": Scenario([128] * 3, 8),
        "256 and 40x16": Scenario([256, *[16] * 40], 12, spread_seconds=600, deaths=(8 * HOUR,)),
        f"{mixed} mixed with churn": Scenario(volunteers, 5, spread_seconds=1800, life_hours=20),
    }


def one_by_one(swarms: int, seed: int = 1) -> dict[str, float]:
    """Joins in random order, of machines with which a plan works at 1/1.1 of their memory: how many stay incomplete."""
    random = Random(seed)
    incomplete = tried = 0
    while tried < swarms:
        sizes = random.sample(MIXED_GIB, random.randint(1, 3))
        machines: list[int] = []
        while len(machines) < 30 and not _could_do(machines):
            machines.append(random.choice(sizes) * GIB - SYSTEM_BYTES)
        if not _could_do(machines):
            continue
        tried += 1
        random.shuffle(machines)
        coverage = Coverage.empty(CUTS[-1])
        for number, memory in enumerate(machines):
            try:
                choice = choose_window(CUTS, coverage, memory, costs(memory), tie_break=str(number))
            except NotEnoughMemory:
                continue
            coverage = coverage.plus(choice.first, choice.last)
        incomplete += bool(coverage.uncovered)
    return {"swarms": tried, "incomplete": incomplete}


def _could_do(machines: Sequence[int]) -> bool:
    smaller = {str(number): int(memory / 1.1) for number, memory in enumerate(machines)}
    if sum(smaller.values()) < weights(0, CUTS[-1]):
        return False
    return bool(plan_swarm(CUTS, smaller, costs(min(smaller.values())), weights).chains)


def plans() -> tuple[dict[str, float], list[str]]:
    """Ratios by fleet, and lines to read."""
    found: dict[str, float] = {}
    lines = []
    fleets = {"5x64": [64] * 5, "3x96": [96] * 3, "3x128": [128] * 3}
    floor = {f"224 GiB as {count}": [224 // count] * count for count in (1, 2, 4, 7)}
    for name, sizes in {**fleets, **floor}.items():
        system = 0 if name in floor else SYSTEM_BYTES
        budgets = {f"{number}": gib * GIB - system for number, gib in enumerate(sizes)}
        memory = {name: gib * GIB for name, gib in zip(budgets, sizes, strict=True)}
        for contexts in default_slots(MANIFEST.n_ctx_train):
            cost = _cost(contexts)
            plan = plan_swarm(CUTS, budgets, cost, weights)
            slots = ", ".join(f"{spec.slots}x{spec.tokens}" for spec in contexts)
            if plan.chains:
                break
            lines.append(f"{name}, slots {slots}: no plan, layers without a machine: {plan.uncovered}")
        if not plan.chains:
            continue
        chain = plan.chains[0]
        left = sum(budgets[machine] - cost(first, last) for machine, first, last in chain) / GIB
        spans = "|".join(f"{first}-{last - 1}" for _, first, last in chain)
        ratio = largest_ratio(chain, memory, weights)
        lines.append(f"{name}: {spans}, largest ratio {ratio:.3f}, {left:.1f} GiB left beside slots {slots}")
        found[f"{name}: largest weights/memory ratio"] = ratio
        found[f"{name}: GiB left"] = left
    return found, lines


def choice_milliseconds(peers: int, repeats: int = 5) -> dict[str, float]:
    """A joiner's choice and a serving node's look, among so many records; the least of some repeats."""
    random = Random(1)
    records = [_record(f"peer-{number}", random) for number in range(peers)]
    memory = 64 * GIB - SYSTEM_BYTES
    planner = Planner(MANIFEST, ModelOptions(Path(GLM52.name)), memory)
    contexts = next(iter(default_slots(MANIFEST.n_ctx_train)))
    place = planner.place(contexts, "me")
    choose = partial(choose_span, CUTS, records, memory, place.cost, artifact_id=MANIFEST.artifact_id, peer_id="me")
    return {
        f"choice among {peers} ms": min(_milliseconds(choose) for _ in range(repeats)),
        f"look among {peers} ms": min(
            _milliseconds(lambda: Mover(place).look(records, (0, 18), 1e6)) for _ in range(repeats)
        ),
    }


def _record(peer_id: str, random: Random) -> SpanRecord:
    first, last = sorted(random.sample(CUTS, 2))
    return SpanRecord(
        peer_id=peer_id,
        artifact_id=MANIFEST.artifact_id,
        n_layers=CUTS[-1],
        first=first,
        last=last,
        state=NodeState.ONLINE,
        protocol_version=1,
        numerics_id="",
        chunk_tokens=512,
        decode_tokens_per_second=random.uniform(0.5, 10),
    )


def _milliseconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return (time.perf_counter() - begun) * 1000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabit", type=float, default=100.0, help="download speed of a node (default: %(default)g)")
    parser.add_argument("--mixed", type=int, default=500, help="volunteers in the mixed swarm (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each small swarm (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write evidence/placement.json")
    given = parser.parse_args(arguments)
    summary, lines = plans()
    samples: dict[str, list[float]] = {}
    for name, scenario in scenarios(given.mixed).items():
        seeds = given.seeds if len(scenario.machines) < 100 else 1
        runs = [simulate(scenario, seed, given.megabit * 1e6 / 8) for seed in range(seeds)]
        for figure in runs[0]:
            samples[f"{name}: {figure}"] = [run[figure] for run in runs]
        lines.append(f"{name}: " + ", ".join(f"{key} {_range(run[key] for run in runs)}" for key in runs[0]))
        print(lines[-1], flush=True)
    for name, rules in (("crowded", MoveRules()), ("crowded, all at once", HURRIED)):
        runs = [crowded(seed, given.megabit * 1e6 / 8, rules) for seed in range(given.seeds)]
        samples |= {f"{name}: {figure}": [run[figure] for run in runs] for figure in runs[0]}
        lines.append(f"{name}: " + ", ".join(f"{key} {_range(run[key] for run in runs)}" for key in runs[0]))
    joins = one_by_one(200)
    summary |= {f"one by one: {key}": value for key, value in joins.items()} | choice_milliseconds(1000)
    bared = sum(sum(values) for name, values in samples.items() if name.endswith("layers_bared_by_moves"))
    covered = all(min(values) >= 0 for name, values in samples.items() if name.endswith("covered_minutes"))
    summary |= {"layers bared by moves": bared, "all swarms covered": float(covered)}
    print("\n".join(lines), *(f"{key}: {value:.4g}" for key, value in summary.items()), sep="\n")
    reached = covered and not bared and not joins["incomplete"]
    if given.record:
        _write(given, samples, summary, reached=reached)
    return 0 if reached else 1


def _range(values: Iterable[float]) -> str:
    low, *_, high = sorted(values) * 2
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _write(
    given: argparse.Namespace, samples: dict[str, list[float]], summary: dict[str, float], *, reached: bool
) -> None:
    record = Record(
        id="placement",
        claim="nodes that decide alone cover GLM-5.2 in simulated swarms, heal it, and leave no layer bare by moving",
        command=f"python -m bench.placement --megabit {given.megabit:g} --mixed {given.mixed} --record",
        commit=this_commit(),
        artifact_id=MANIFEST.artifact_id,
        engine_build="none: simulated",
        hardware=this_machine(),
        settings={"megabit": given.megabit, "mixed": given.mixed, "seeds": given.seeds, "simulated": True},
        samples=samples,
        summary=summary,
        target="all swarms covered, no layer bared by a move, joins in any order cover at 1.1 times the need",
        verdict="reached" if reached else "missed",
    )
    print(f"written: {record.write()}")


if __name__ == "__main__":
    sys.exit(main())

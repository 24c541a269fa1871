"""``--plan``: which layers machines would serve that belong together, as a table. Nothing is joined or loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from swarm.artifact import Manifest
from swarm.artifact.catalog import NAMES, named
from swarm.artifact.local_path import user_path
from swarm.artifact.memory import format_bytes
from swarm.artifact.sizes import parse_size
from swarm.errors import UsageError
from swarm.node import options
from swarm.node.completeness import spans_text
from swarm.node.config import ModelOptions
from swarm.node.plan import Planner
from swarm.node.settings import Settings
from swarm.node.slots import parse_slots
from swarm.placement.choice import Cost
from swarm.placement.fleet import Plan, Served, largest_ratio, plan_swarm
from swarm.store.find import given_manifest

MOST_MACHINES = 1000
SMALLEST_MACHINE = 1 << 20  # bytes; less is a number whose unit was left out


def plan_lines(settings: Settings, machines: str) -> list[str]:
    """The plan for ``"5x64GiB,128GiB"``, which is what each machine has free: the node itself and a reserve are taken
    from it, too. Raises ``UsageError``."""
    budgets = parse_machines(machines)
    manifest = _manifest(settings)
    planner = Planner(manifest, _options(settings), 0)
    for contexts in planner.candidates():
        cost = planner.place(contexts, "").cost
        plan = plan_swarm(manifest.cuts, budgets, cost, manifest.span_bytes)
        if plan.chains:
            break
    slots = ", ".join(f"{spec.slots}x{spec.tokens}" for spec in contexts)
    return [f"{manifest.name}, slots {slots}:", *_table(plan, budgets, cost, manifest)]


def parse_machines(text: str) -> dict[str, int]:
    """``"2x64GiB,128GiB"`` -> name and bytes of each."""
    budgets: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,4})[x×])?(.+?)\s*", part)
        if match is None:
            raise UsageError(f"--plan {text}: {part!r} is not a machine's memory; write for example 5x64GiB,128GiB")
        size = parse_size(match[2], "--plan", "64GiB")
        if size < SMALLEST_MACHINE:
            raise UsageError(f"--plan {text}: {part.strip()!r} is less than 1 MiB; name the unit, for example 3x96GiB")
        for _ in range(int(match[1] or 1)):
            budgets[f"machine {len(budgets) + 1:>3} ({format_bytes(size)})"] = size
    if not 1 <= len(budgets) <= MOST_MACHINES:
        raise UsageError(f"--plan {text}: {len(budgets)} machines; name 1 to {MOST_MACHINES}")
    return budgets


def _table(plan: Plan, budgets: dict[str, int], cost: Cost, manifest: Manifest) -> Iterator[str]:
    for number, chain in enumerate(plan.chains, 1):
        ratio = largest_ratio(chain, budgets, manifest.span_bytes)
        yield f"chain {number}, largest weights/memory ratio {ratio:.2f}:"
        yield from (_row(served, budgets, cost, manifest) for served in chain)
    if plan.support:
        yield "in support of the weakest layers:" if plan.chains else "too small together, as far as they go:"
        yield from (_row(served, budgets, cost, manifest) for served in plan.support)
    yield from (f"  {name}: too small for any layers" for name in plan.idle)
    if plan.uncovered:
        yield f"without a machine: layers {spans_text(plan.uncovered)}"
    else:
        yield f"each layer has at least {plan.replicas} {'machine' if plan.replicas == 1 else 'machines'}"


def _row(served: Served, budgets: dict[str, int], cost: Cost, manifest: Manifest) -> str:
    name, first, last = served
    weights, needed = manifest.span_bytes(first, last), cost(first, last)
    return (
        f"  {name}: --layers {first}:{last}, weights {format_bytes(weights)} ({weights / budgets[name]:.2f}), "
        f"{format_bytes(needed)} with KV, buffers and reserve, {format_bytes(budgets[name] - needed)} left"
    )


def _manifest(settings: Settings) -> Manifest:
    if settings.manifest is not None:
        return given_manifest(user_path(settings.manifest))
    known = named(settings.model)
    if known is not None:
        return known.manifest
    raise UsageError(
        f"--plan: the sizes of {settings.model} are not known here; choose {', '.join(NAMES)}, or give --manifest FILE"
    )


def _options(settings: Settings) -> ModelOptions:
    """Those that memory depends on."""
    return ModelOptions(
        Path(settings.model),
        contexts=None if settings.slots is None else parse_slots(settings.slots),
        chunk_tokens=options.count("--chunk-tokens", settings.chunk_tokens, 1, options.MAX_CHUNK_TOKENS),
        kv_type=options.kv_type(settings.kv_type),
        journal_bytes=parse_size(settings.journal_memory, "--journal-memory", "256MiB", zero=True),
        mtp=settings.mtp,
    )

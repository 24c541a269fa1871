"""Whether a node takes the memory that its plan says: real loads, one process each, compared in total.

Each case loads a span with slots, reads all its weights in, fills a slot of every size up to its last chunk and
computes that chunk, which is what the engine's buffers are made for. Then every private page of the node, its worker
and its libp2p daemon counts, their libraries, and what the page cache holds of the span's weights. Not counted on
either side: the journal, which fills while serving, and what the plan leaves free.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil

from bench.page_cache import PAGE, resident_in, resident_pages
from bench.record import Record, this_commit, this_machine
from shim.types import StepBatch, SummarySpec
from swarm.artifact import Manifest, embedded, load_manifest
from swarm.artifact.catalog import GLM_TINY, LocalModel, find_model, open_model
from swarm.artifact.memory import format_bytes
from swarm.errors import SwarmError
from swarm.ids import SessionId
from swarm.node.config import ModelOptions, NetworkOptions, NodeConfig, Weights
from swarm.node.engine_host import EngineHost
from swarm.node.footprint import process_memory, together
from swarm.node.node import SwarmNode
from swarm.node.slots import parse_slots
from swarm.node.weights import span_ranges

TARGET = 0.05
SLOTS = ("1x2048", "4x4096", "8x1024,1x8192")
GLM_SLOTS = ("1x4096", "4x4096", "4x4096,1x16384")
WRITE_TOKENS = 1024  # of the cache, at once


@dataclass(frozen=True)
class Case:
    """Layers [first, last) of a model, with the MTP block or without."""

    path: Path
    first: int
    last: int
    slots: str
    mtp: bool = False

    @property
    def name(self) -> str:
        span = f"{self.path.stem.replace(' ', '_')}_{self.first}:{self.last}_{self.slots}"
        return f"{span}_mtp" if self.mtp else span


@dataclass(frozen=True)
class Taken:
    """In bytes."""

    planned: int
    taken: int
    reported: int  # by the engine, of what was planned for it
    reported_plan: int
    processes: int  # beside the engine's buffers
    weights_cached: int
    numerics_id: str

    @property
    def off(self) -> float:
        return self.planned / self.taken - 1


def cases(path: Path, slots: Sequence[str]) -> list[Case]:
    """A span at the start, in the middle and at the end, and all of it."""
    manifest = _manifest(path)
    n, cuts = manifest.n_layers, manifest.cuts
    near = [min(cuts, key=lambda cut: abs(cut - n * part // 3)) for part in (1, 2)]
    edges = sorted({0, n, *near})
    spans = sorted({*pairwise(edges), (0, n)})
    found = [Case(path, first, last, one) for first, last in spans for one in slots]
    if manifest.n_mtp:
        found.append(Case(path, edges[-2], n, slots[1], mtp=True))
    return found


def _manifest(path: Path) -> Manifest:
    return open_model(LocalModel(path)).manifest


# --- one case, in a process of its own


async def measure(case: Case, threads: int, folder: Path) -> Taken:
    options = ModelOptions(
        case.path,
        f"{case.first}:{case.last}",
        contexts=parse_slots(case.slots),
        threads=threads,
        journal_bytes=0,
        mtp=case.mtp,
        weights=Weights.PREFETCHED,
    )
    network = NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), identity_path=folder / "identity")
    async with SwarmNode(NodeConfig(options, network, journal_folder=folder, measure_speed=False)) as node:
        host, planned = node.shared.host, node.serving.plan.memory
        await _work(host, node.shared.chunk_tokens)
        assert host.pid is not None
        children = [child.pid for child in psutil.Process().children()]
        found = [process_memory(pid) for pid in (os.getpid(), *children)]
        own = together(found, frozenset({str(case.path.resolve())}))
        cached = _cached(node.manifest, case)
        info = host.info
        engine = info.kv_bytes + info.compute_bytes + info.output_bytes
        return Taken(
            planned=planned.total_bytes - planned.reserve_bytes,
            taken=own + cached,
            reported=engine + info.weights_bytes,
            reported_plan=planned.engine_bytes,
            processes=own - engine,
            weights_cached=cached,
            numerics_id=info.numerics_id,
        )


def _cached(manifest: Manifest, case: Case) -> int:
    pages = resident_pages(case.path)
    ranges = span_ranges(manifest, case.path.parent, case.first, case.last, mtp=case.mtp)
    return sum(resident_in(pages, part.start, part.stop) for part in ranges) * PAGE


async def _work(host: EngineHost, chunk_tokens: int) -> None:
    """The last chunk of a slot of every size, behind a cache that is filled with zeros."""
    info = host.info
    slot = 0
    for spec in info.contexts:
        rows = min(chunk_tokens, info.chunk_tokens, spec.tokens)
        await _fill(host, slot, spec.tokens - rows)
        await host.step((), _chunk(host, slot, spec.tokens - rows, rows), _wanted(host))
        await host.truncate(slot, 0)
        slot += spec.slots


def _wanted(host: EngineHost) -> tuple[SummarySpec, ...]:
    return (SummarySpec(),) if host.info.is_exit else ()


def _chunk(host: EngineHost, slot: int, start: int, rows: int) -> StepBatch:
    info = host.info
    noise = np.random.default_rng(0)
    return StepBatch(
        run=(info.first, info.last),
        slot=np.full(rows, slot, np.int32),
        position=np.arange(start, start + rows, dtype=np.int32),
        tokens=np.arange(rows, dtype=np.int32) % info.n_vocab if info.is_entry or info.n_mtp else None,
        hidden=None if info.is_entry else noise.standard_normal((rows, info.n_embd), np.float32),
        want=np.eye(1, rows, rows - 1, dtype=np.uint8)[0] if info.is_exit else None,
        tiled=True,
    )


async def _fill(host: EngineHost, slot: int, tokens: int) -> None:
    for layer in range(host.info.first, host.info.last):
        row_bytes = (await host.kv_row_bytes(layer)).total
        for first in range(0, tokens, WRITE_TOKENS):
            count = min(WRITE_TOKENS, tokens - first)
            await host.kv_write(SessionId(bytes(16)), slot, layer, first, bytes(count * row_bytes))


def run_case(case: Case, threads: int) -> Taken:
    """In a child: a process keeps pages of what it did before. Raises SwarmError."""
    command = [
        sys.executable,
        "-m",
        "bench.memory_plan",
        "--case",
        json.dumps({**asdict(case), "path": str(case.path)}),
    ]
    ended = subprocess.run([*command, "--threads", str(threads)], stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SwarmError(f"{case.name} ended with {ended.returncode}; its messages are above")
    return Taken(**json.loads(ended.stdout))


# --- all of them


def record_of(found: dict[Case, Taken], command: str, threads: int) -> Record:
    worst = max(abs(taken.off) for taken in found.values())
    samples: dict[str, list[float]] = {}
    summary = {"worst_off_percent": 100 * worst}
    for case, taken in found.items():
        samples[f"{case.name}_planned_and_taken_bytes"] = [taken.planned, taken.taken]
        samples[f"{case.name}_engine_planned_and_reported_bytes"] = [taken.reported_plan, taken.reported]
        summary[f"{case.name}_off_percent"] = 100 * taken.off
    processes = [taken.processes for taken in found.values()]
    summary["least_processes_bytes"], summary["most_processes_bytes"] = min(processes), max(processes)
    ids = {case.path: load_manifest(case.path).artifact_id for case in found}
    return Record(
        id="memory-plan",
        claim=f"What a node plans to take is within {100 * worst:.1f} % of what it takes, in {len(found)} real loads.",
        command=command,
        commit=this_commit(),
        artifact_id=" ".join(ids.values()),
        engine_build=next(iter(found.values())).numerics_id,
        hardware=this_machine(),
        settings={"models": " ".join(path.name for path in ids), "chunk_tokens": 512, "threads": threads},
        samples=samples,
        summary=summary,
        target=f"within {TARGET:.0%} in total",
        verdict="reached" if worst <= TARGET else "missed",
    )


def line(case: Case, taken: Taken) -> str:
    return (
        f"{case.name}: planned {format_bytes(taken.planned)}, taken {format_bytes(taken.taken)} ({taken.off:+.1%}); "
        f"engine {format_bytes(taken.reported_plan)} -> {format_bytes(taken.reported)}, "
        f"processes {format_bytes(taken.processes)}, weights in the page cache {format_bytes(taken.weights_cached)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.memory_plan", description=__doc__.splitlines()[0])
    parser.add_argument("--glm", type=Path, metavar="FILE", help="a bench slice (python -m bench.glm_slice), as well")
    parser.add_argument("--threads", type=int, default=2, help="of the engine (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write evidence/memory-plan.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        given = json.loads(options.case)
        with tempfile.TemporaryDirectory(prefix="glm-swarm-bench-") as folder:
            case = Case(**{**given, "path": Path(given["path"])})
            print(json.dumps(asdict(asyncio.run(measure(case, options.threads, Path(folder))))))
        return 0
    wanted = cases(embedded.fetch(), SLOTS) + cases(find_model(GLM_TINY).path, SLOTS)
    if options.glm:
        layers = load_manifest(options.glm).n_layers
        wanted += [Case(options.glm, 0, layers, one) for one in GLM_SLOTS]
    found: dict[Case, Taken] = {}
    try:
        for case in wanted:
            found[case] = run_case(case, options.threads)
            print(line(case, found[case]), flush=True)
    except SwarmError as error:
        print(f"memory_plan: {error}", file=sys.stderr)
        return error.exit_code
    glm = f" --glm {options.glm.name}" if options.glm else ""
    record = record_of(found, f"python -m bench.memory_plan --threads {options.threads}{glm} --record", options.threads)
    print(f"{record.claim}\ntarget: {record.target}: {record.verdict}")
    if options.record:
        print(f"recorded in {record.write()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

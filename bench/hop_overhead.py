"""What a hop costs: the same tokens through the unsplit model in this process and through chains of 1, 2 and 3 nodes.

All swarms run beside each other for the whole time and take turns, so that noise of the machine meets all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.record import Record, percentile, this_commit, this_machine
from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, StepBatch, SummarySpec
from swarm.artifact import embedded, load_manifest
from swarm.client import LastingSession, StepRequest, SwarmClient, WantedRow
from swarm.client.trace import StepTrace
from swarm.local_swarm import even_spans, local_swarm
from swarm.protocol import pb

HOPS = (1, 2, 3)
TARGET_MS = 1.5
CONTEXT_TOKENS = 1024


@dataclass(frozen=True)
class Work:
    """What every contender computes: the prompt as one chunk, then the tokens one by one."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass
class Samples:
    """Seconds per decoded token, and for chains the milliseconds per hop that were not compute."""

    token_seconds: list[float] = field(default_factory=list)
    overhead_ms: list[float] = field(default_factory=list)
    parts_ms: dict[str, list[float]] = field(default_factory=dict)

    def add_step(self, seconds: float, trace: StepTrace) -> None:
        hops = len(trace.hops)
        compute = sum(hop.compute_us for hop in trace.hops)
        self.token_seconds.append(seconds)
        self.overhead_ms.append((trace.total_us - compute) / 1000 / hops)
        network = trace.return_us + sum(hop.network_us for hop in trace.hops)
        for name, microseconds in (
            ("queue", sum(hop.queue_us for hop in trace.hops)),
            ("ipc", sum(hop.ipc_us for hop in trace.hops)),
            ("serialise", sum(hop.serialise_us for hop in trace.hops)),
            ("network", network),
        ):
            self.parts_ms.setdefault(name, []).append(microseconds / 1000 / hops)

    @property
    def tokens_per_second(self) -> float:
        return 1 / statistics.median(self.token_seconds)


def run_unsplit(engine: Engine, work: Work, samples: Samples) -> None:
    n = len(work.prompt)
    unsplit_step(engine, work.prompt, 0, tiled=True)
    for number, token in enumerate(work.tokens):
        began = time.perf_counter()
        unsplit_step(engine, (token,), n + number, tiled=False)
        samples.token_seconds.append(time.perf_counter() - began)


def unsplit_step(engine: Engine, tokens: Sequence[int], start: int, *, tiled: bool) -> None:
    n = len(tokens)
    want = np.zeros(n, np.uint8)
    want[-1] = 1
    batch = StepBatch(
        run=(0, engine.info.n_layers),
        slot=np.zeros(n, np.int32),
        position=np.arange(start, start + n, dtype=np.int32),
        tokens=np.array(tokens, np.int32),
        want=want,
        tiled=tiled,
    )
    engine.step(batch, (SummarySpec(),))


async def run_chain(session: LastingSession, work: Work, samples: Samples) -> None:
    n = len(work.prompt)
    await session.step(StepRequest(0, work.prompt, pb.PREFILL, WantedRow()))
    for number, token in enumerate(work.tokens):
        began = time.perf_counter()
        answer = await session.step(StepRequest(n + number, (token,), pb.DECODE, WantedRow()))
        samples.add_step(time.perf_counter() - began, answer.trace)


async def measure(options: argparse.Namespace) -> Record:
    manifest = load_manifest(options.model)
    rng = np.random.default_rng(0)
    tokens = tuple(rng.integers(0, manifest.n_vocab, options.prompt_tokens + options.tokens).tolist())
    work = Work(tokens[: options.prompt_tokens], tokens[options.prompt_tokens :])
    samples = {hops: Samples() for hops in (0, *HOPS)}
    config = EngineConfig(options.model, contexts=(ContextSpec(1, CONTEXT_TOKENS),), threads=options.threads)
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(Engine.open(config))
        addresses = {hops: await asyncio.to_thread(_start, stack, options, hops) for hops in HOPS}
        sessions = {hops: await _open(stack, address) for hops, address in addresses.items()}
        assert all(len(session.places) == hops for hops, session in sessions.items())
        for round_number in range(options.rounds + 1):
            for hops, kept in samples.items():
                into = kept if round_number else Samples()  # the first round warms up
                if hops:
                    await run_chain(sessions[hops], work, into)
                else:
                    await asyncio.to_thread(run_unsplit, engine, work, into)  # heartbeats go on meanwhile
            print(f"round {round_number} of {options.rounds} done", file=sys.stderr, flush=True)
        build = engine.info.numerics_id
    return _record(options, manifest.artifact_id, build, samples)


def _start(stack: AsyncExitStack, options: argparse.Namespace, hops: int) -> str:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="glm-swarm-bench-")))
    spans = even_spans(load_manifest(options.model), hops)
    arguments = ["--threads", str(options.threads), "--slots", f"2x{CONTEXT_TOKENS}", "--chunk-tokens", "512"]
    return stack.enter_context(local_swarm(options.model, spans, folder, arguments)).address


async def _open(stack: AsyncExitStack, address: str) -> LastingSession:
    client = await stack.enter_async_context(SwarmClient.connect([address]))
    return await stack.enter_async_context(await client.open_session(CONTEXT_TOKENS))


def _record(options: argparse.Namespace, artifact_id: str, build: str, samples: dict[int, Samples]) -> Record:
    unsplit = samples[0].tokens_per_second
    summary = {"unsplit_tokens_per_second": unsplit}
    raw = {"unsplit_token_seconds": samples[0].token_seconds}
    for hops in HOPS:
        taken = samples[hops]
        name = f"{hops}_hops"
        summary[f"{name}_tokens_per_second"] = taken.tokens_per_second
        summary[f"{name}_ratio_to_unsplit"] = taken.tokens_per_second / unsplit
        summary[f"{name}_overhead_per_hop_p50_ms"] = percentile(taken.overhead_ms, 0.5)
        summary[f"{name}_overhead_per_hop_p95_ms"] = percentile(taken.overhead_ms, 0.95)
        for part, milliseconds in taken.parts_ms.items():
            summary[f"{name}_{part}_per_hop_p50_ms"] = percentile(milliseconds, 0.5)
        raw[f"{name}_token_seconds"] = taken.token_seconds
        raw[f"{name}_overhead_per_hop_ms"] = taken.overhead_ms
    worst = max(summary[f"{hops}_hops_overhead_per_hop_p50_ms"] for hops in HOPS)
    return Record(
        id="hop-overhead",
        claim=f"On one machine a hop adds {worst:.2f} ms (p50, worst chain) to a decoded token beside its compute.",
        command=f"python -m bench.hop_overhead --tokens {options.tokens} --rounds {options.rounds}"
        f" --threads {options.threads} --record",
        commit=this_commit(),
        artifact_id=artifact_id,
        engine_build=build,
        hardware=this_machine(),
        settings={
            "model": options.model.name,
            "prompt_tokens": options.prompt_tokens,
            "tokens": options.tokens,
            "rounds": options.rounds,
            "threads": options.threads,
        },
        samples=raw,
        summary=summary,
        target=f"overhead per hop p50 < {TARGET_MS} ms",
        verdict="reached" if worst < TARGET_MS else "missed",
    )


def report(record: Record) -> str:
    """The record's summary as a table."""
    value = record.summary
    columns = f"{'':10}{'tokens/s':>10}{'ratio':>8}{'overhead a hop, ms: p50':>26}{'p95':>8}"
    lines = [f"{columns}   of which p50: queue, ipc, serialise, network"]
    lines.append(f"{'unsplit':10}{value['unsplit_tokens_per_second']:10.1f}{1:8.3f}")
    for hops in HOPS:
        name = f"{hops}_hops"
        parts = ", ".join(
            f"{value[f'{name}_{part}_per_hop_p50_ms']:.2f}" for part in ("queue", "ipc", "serialise", "network")
        )
        lines.append(
            f"{hops} {'hop' if hops == 1 else 'hops':8}{value[f'{name}_tokens_per_second']:10.1f}"
            f"{value[f'{name}_ratio_to_unsplit']:8.3f}{value[f'{name}_overhead_per_hop_p50_ms']:26.2f}"
            f"{value[f'{name}_overhead_per_hop_p95_ms']:8.2f}   {parts}"
        )
    lines.append(f"target: {record.target}: {record.verdict}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hop_overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file (default: SmolLM2-135M)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded per round (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="length of the prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write evidence/hop-overhead.json")
    options = parser.parse_args(arguments)
    options.model = options.model or embedded.fetch()
    record = asyncio.run(measure(options))
    print(report(record))
    if options.record:
        print(f"recorded in {record.write()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

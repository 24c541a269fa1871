"""Many clients over three local nodes, against the same engines driven in process with the calls that the nodes made.

A round goes through all numbers of clients; at each the swarm, the replay of its calls and the unsplit model take
turns, so that noise of the machine meets all alike. The unsplit model decodes all clients' rows in each call, with as
many threads as all nodes have, or the machine has cores. Processor time is compared, too: it hardly depends on who else
uses the machine. Between two calls of an engine, when the second waits already, it stands still for what the nodes tell
as "ipc": the reply is written, the next request read.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from bench.crowd import Replay, calls_of, crowd, log_path, processor
from bench.crowd.naming import model_option, record_id
from bench.record import Record, percentile, this_commit, this_machine
from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, StepBatch, SummarySpec
from swarm.artifact import Manifest, embedded, load_manifest
from swarm.client import SwarmClient
from swarm.local_swarm import even_spans, local_swarm

CLIENTS = (1, 2, 4, 8, 16)
TARGET_CLIENTS = 8
TARGET_RATIO = 0.90
MIN_SLOT_TOKENS = 256  # a node offers no shorter ones
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")  # in which the system counts processor time


@dataclass
class Taken:
    """Of one number of clients: seconds of each round, and of each client's tokens."""

    swarm: list[float] = field(default_factory=list)
    replay: list[float] = field(default_factory=list)
    unsplit: list[float] = field(default_factory=list)
    batch_rows: list[float] = field(default_factory=list)  # mean of a decode call, by round
    token_seconds: list[list[float]] = field(default_factory=list)  # by client, over all rounds
    processor: dict[str, list[float]] = field(default_factory=dict)  # seconds by part of the swarm, by round
    replay_processor: list[float] = field(default_factory=list)
    call_us: list[int] = field(default_factory=list)  # of the engine calls of decode steps, once for each of its rows
    beside_us: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Speed of the swarm as a share of the replay's."""
        return statistics.median(ours / swarm for ours, swarm in zip(self.replay, self.swarm, strict=True))

    @property
    def processor_ratio(self) -> float:
        """What the replay takes of processor time, as a share of what the swarm and its clients take."""
        rounds = zip(*self.processor.values(), strict=True)
        # a round of a few tokens may take less than a tick, and then counts as nothing
        shares = [
            ours / max(sum(parts), TICK_SECONDS) for ours, parts in zip(self.replay_processor, rounds, strict=True)
        ]
        return float(statistics.median(shares))


@dataclass
class Results:
    manifest: Manifest
    engine_build: str = ""
    taken: dict[int, Taken] = field(default_factory=dict)  # by number of clients


class Bench:
    """What stays open for the whole time."""

    def __init__(self, options: argparse.Namespace, manifest: Manifest, folder: Path) -> None:
        self.options = options
        self.spans = even_spans(manifest, options.hops)
        self.logs = [log_path(folder / f"node{number}.key") for number in range(options.hops)]
        self._folder = folder
        self._manifest = manifest
        self._rng = np.random.default_rng(0)
        self.slots = ContextSpec(max(options.clients), self._slot_tokens())
        threads = min(psutil.cpu_count() or 1, options.hops * options.threads)
        self.unsplit = self._engine(0, None, threads)
        self.replay = Replay([self._engine(first, last, options.threads) for first, last in self.spans])

    def _engine(self, first: int, last: int | None, threads: int) -> Engine:
        chunk = self.options.prompt_tokens
        return Engine.open(EngineConfig(self.options.model, first, last, (self.slots,), threads, chunk))

    def _slot_tokens(self) -> int:
        return max(MIN_SLOT_TOKENS, int(self.options.prompt_tokens + self.options.tokens))

    def start(self, stack: AsyncExitStack) -> str:
        """The address of a swarm with as much room."""
        arguments = ["--threads", str(self.options.threads), "--slots", f"{self.slots.slots}x{self.slots.tokens}"]
        arguments += ["--chunk-tokens", str(self.options.prompt_tokens)]
        swarm = local_swarm(self.options.model, self.spans, self._folder, arguments, module="bench.crowd.node")
        started = stack.enter_context(swarm)
        self._pids = [node.process.pid for node in started.nodes]
        return started.address

    def scripts(self, n_clients: int) -> list[list[int]]:
        length = self.options.prompt_tokens + self.options.tokens
        found: list[list[int]] = self._rng.integers(0, self._manifest.n_vocab, (n_clients, length)).tolist()
        return found

    async def once(self, peers: Sequence[SwarmClient], n_clients: int, into: Taken) -> None:
        options, scripts = self.options, self.scripts(n_clients)
        async with crowd(peers, scripts, options.prompt_tokens, self.slots.tokens) as clients:
            await clients.prefill()
            before = processor.spent(self._pids)
            into.swarm.append(await clients.decode())
            for part, seconds in processor.since(before, processor.spent(self._pids)).items():
                into.processor.setdefault(part, []).append(seconds)
            tokens = dict(zip([client.id for client in clients.clients], scripts, strict=True))
            for number, gaps in enumerate(clients.token_seconds):
                into.token_seconds[number] += gaps
            into.call_us += [hop.compute_us for hop in clients.hops]
            into.beside_us += [hop.ipc_us for hop in clients.hops]
        calls = [calls_of(path, frozenset(tokens)) for path in self.logs]
        into.batch_rows.append(statistics.mean(call.rows for log in calls for call in log if not call.tiled))
        replayed = await asyncio.to_thread(self.replay.run, calls, tokens)  # the peer stays awake meanwhile
        into.replay.append(replayed.seconds)
        into.replay_processor.append(replayed.processor_seconds)
        into.unsplit.append(await asyncio.to_thread(self._decode_unsplit, scripts))

    def _decode_unsplit(self, scripts: Sequence[Sequence[int]]) -> float:
        """Seconds to decode all scripts in step."""
        n_prompt = self.options.prompt_tokens
        for slot, tokens in enumerate(scripts):
            positions = np.arange(n_prompt, dtype=np.int32)
            self._unsplit_step(np.full(n_prompt, slot, np.int32), positions, tokens[:n_prompt], tiled=True)
        began = time.perf_counter()
        slots = np.arange(len(scripts), dtype=np.int32)
        for position in range(n_prompt, n_prompt + self.options.tokens):
            column = [tokens[position] for tokens in scripts]
            self._unsplit_step(slots, np.full(len(scripts), position, np.int32), column, tiled=False)
        return time.perf_counter() - began

    def _unsplit_step(
        self,
        slot: np.ndarray[tuple[int], np.dtype[np.int32]],
        position: np.ndarray[tuple[int], np.dtype[np.int32]],
        tokens: Sequence[int],
        *,
        tiled: bool,
    ) -> None:
        want = np.full(len(slot), 0 if tiled else 1, np.uint8)
        want[-1] = 1
        run = (0, self._manifest.n_layers)
        batch = StepBatch(run, slot, position, np.array(tokens, np.int32), want=want, tiled=tiled)
        self.unsplit.step(batch, (SummarySpec(),) * int(want.sum()))

    def close(self) -> None:
        self.replay.close()


async def measure(options: argparse.Namespace) -> Results:
    results = Results(load_manifest(options.model))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="glm-swarm-bench-")))
        bench = Bench(options, results.manifest, folder)
        stack.callback(bench.close)
        results.engine_build = bench.unsplit.info.numerics_id
        address = await asyncio.to_thread(bench.start, stack)
        peers = [await stack.enter_async_context(SwarmClient.connect([address])) for _ in range(options.peers)]
        for round_number in range(options.rounds + 1):
            for n_clients in options.clients:
                kept = results.taken.setdefault(n_clients, _nothing(n_clients))
                await bench.once(peers, n_clients, kept if round_number else _nothing(n_clients))  # the first warms up
            print(f"round {round_number} of {options.rounds} done", file=sys.stderr, flush=True)
    return results


def _nothing(n_clients: int) -> Taken:
    return Taken(token_seconds=[[] for _ in range(n_clients)])


def record_of(options: argparse.Namespace, results: Results) -> Record:
    summary: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    for clients, taken in results.taken.items():
        name = f"{clients}_clients"
        tokens = clients * options.tokens
        summary[f"{name}_tokens_per_second"] = tokens / statistics.median(taken.swarm)
        summary[f"{name}_ratio_to_same_calls_in_process"] = taken.ratio
        summary[f"{name}_unsplit_batch_tokens_per_second"] = tokens / statistics.median(taken.unsplit)
        summary[f"{name}_rows_per_call"] = statistics.mean(taken.batch_rows)
        summary[f"{name}_processor_ratio_to_same_calls_in_process"] = taken.processor_ratio
        for part, spent in taken.processor.items():
            summary[f"{name}_processor_ms_per_token_{part}"] = 1e3 * statistics.median(spent) / tokens
        replayed = statistics.median(taken.replay_processor)
        summary[f"{name}_processor_ms_per_token_in_process"] = 1e3 * replayed / tokens
        summary[f"{name}_engine_call_p50_ms"] = statistics.median(taken.call_us) / 1e3
        summary[f"{name}_between_engine_calls_p50_ms"] = statistics.median(taken.beside_us) / 1e3
        for share, label in ((0.5, "p50"), (0.95, "p95")):
            worst = max(percentile(seconds, share) for seconds in taken.token_seconds)
            summary[f"{name}_inter_token_{label}_ms_worst_client"] = 1e3 * worst
        samples |= {f"{name}_seconds": taken.swarm, f"{name}_replay_seconds": taken.replay}
        samples[f"{name}_unsplit_seconds"] = taken.unsplit
        samples |= {f"{name}_{n}_token_seconds": seconds for n, seconds in enumerate(taken.token_seconds)}
    goal = TARGET_CLIENTS if TARGET_CLIENTS in results.taken else max(results.taken)
    ratio = summary[f"{goal}_clients_ratio_to_same_calls_in_process"]
    counts = ",".join(map(str, options.clients))
    return Record(
        id=record_id("many-clients", options.model),
        claim=f"{goal} clients over {options.hops} local nodes decode at {ratio:.2f} of the speed of the same engines "
        "driven in process with the same calls.",
        command=f"python -m bench.many_clients{model_option(options.model)} --clients {counts} --hops {options.hops}"
        f" --tokens {options.tokens} --prompt-tokens {options.prompt_tokens} --rounds {options.rounds}"
        f" --threads {options.threads} --peers {options.peers} --record",
        commit=this_commit(),
        artifact_id=results.manifest.artifact_id,
        engine_build=results.engine_build,
        hardware=this_machine(),
        settings={
            "model": options.model.name,
            "hops": options.hops,
            "tokens": options.tokens,
            "prompt_tokens": options.prompt_tokens,
            "rounds": options.rounds,
            "threads": options.threads,
            "peers": options.peers,
        },
        samples=samples,
        summary=summary,
        target=f"{goal} clients: aggregate tokens/s >= {TARGET_RATIO} of the same calls in process",
        verdict="reached" if ratio >= TARGET_RATIO else "missed",
    )


def report(record: Record) -> str:
    """The record's summary as a table."""
    value = record.summary
    lines = [
        f"{'clients':>7}{'tokens/s':>10}{'of the same calls':>19}{'rows a call':>13}{'token p50, ms':>15}{'p95':>7}"
        f"{'engine call, and between':>26}{'unsplit, one batch: tokens/s':>30}"
    ]
    for clients in _numbers(record):
        name = f"{clients}_clients"
        lines.append(
            f"{clients:7}{value[f'{name}_tokens_per_second']:10.1f}"
            f"{value[f'{name}_ratio_to_same_calls_in_process']:19.3f}{value[f'{name}_rows_per_call']:13.2f}"
            f"{value[f'{name}_inter_token_p50_ms_worst_client']:15.1f}"
            f"{value[f'{name}_inter_token_p95_ms_worst_client']:7.1f}"
            f"{value[f'{name}_engine_call_p50_ms']:17.2f}, {value[f'{name}_between_engine_calls_p50_ms']:4.2f} ms"
            f"{value[f'{name}_unsplit_batch_tokens_per_second']:30.1f}"
        )
    lines += ["", "processor time, ms a token", f"{'clients':>7}{'in process':>12}{'share of the swarm':>20}"]
    lines[-1] += "".join(f"{part:>10}" for part in processor.PARTS)
    for clients in _numbers(record):
        name = f"{clients}_clients_processor"
        lines.append(
            f"{clients:7}{value[f'{name}_ms_per_token_in_process']:12.2f}"
            f"{value[f'{name}_ratio_to_same_calls_in_process']:20.3f}"
            + "".join(f"{value[f'{name}_ms_per_token_{part}']:10.2f}" for part in processor.PARTS)
        )
    lines.append(f"target: {record.target}: {record.verdict}")
    return "\n".join(lines)


def _numbers(record: Record) -> list[int]:
    """Of clients."""
    keys = [key.partition("_clients_tokens_per_second") for key in record.summary]
    return [int(number) for number, found, rest in keys if found and not rest]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.many_clients", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="GGUF file (default: SmolLM2-135M)")
    add("--clients", type=_counts, default=CLIENTS, metavar="N,...", help="default: 1,2,4,8,16")
    add("--hops", type=int, default=3, help="nodes (default: %(default)s)")
    add("--tokens", type=int, default=48, help="tokens that a client decodes per round (default: %(default)s)")
    add("--prompt-tokens", type=int, default=32, help="before them, as one chunk (default: %(default)s)")
    add("--rounds", type=int, default=3, help="rounds that count (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of each engine (default: %(default)s)")
    add("--peers", type=int, default=1, help="peers that the clients are of (default: %(default)s)")
    add(
        "--record", action="store_true", help="write evidence/many-clients.json, of a bench slice many-clients-glm.json"
    )
    return parser


def _counts(text: str) -> tuple[int, ...]:
    values = tuple(sorted({int(part) for part in text.split(",")}))
    if values[0] < 1:
        raise ValueError(text)
    return values


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.model = options.model or embedded.fetch()
    record = record_of(options, asyncio.run(measure(options)))
    print(report(record))
    if options.record:
        print(f"recorded in {record.write()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

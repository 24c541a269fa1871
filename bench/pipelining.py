"""What keeping both hops of a chain busy gives: a core for each, chunks sent ahead, and two clients instead of one.

The ways take turns within a round, so that noise of the machine meets all alike. With --links the nodes are behind
links of a delay each; without, they share the machine's loopback. Beside each gain stands the one that the same halves
of the model have in this process, with the same batches and no swarm around them: no chain can give more.

Of SmolLM2 the prefill is what counts: its rows are so cheap that a chain's own work takes as long. Of layers of real
size (``bench.glm_slice``) it is the two clients: for a chunk, the exit of so few has a third of the entry's work.
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

from bench.crowd import crowd
from bench.crowd.ceiling import Ceiling
from bench.crowd.naming import is_slice, model_option, record_id
from bench.crowd.pin import pin
from bench.links import Shape
from bench.links.linked_swarm import linked_swarm
from bench.record import Record, this_commit, this_machine
from swarm.artifact import Manifest, embedded, load_manifest
from swarm.client import SwarmClient
from swarm.errors import UsageError
from swarm.local_swarm import even_spans, local_swarm

HOPS = 2
TARGET = 1.8
MIN_SLOT_TOKENS = 256  # a node offers no shorter ones


@dataclass
class Samples:
    """Seconds of each round."""

    numerics_id: str = ""
    unpipelined: list[float] = field(default_factory=list)
    pipelined: list[float] = field(default_factory=list)
    one_client: list[float] = field(default_factory=list)
    two_clients: list[float] = field(default_factory=list)  # until both are done
    prefill_ceiling: list[float] = field(default_factory=list)  # ratios, without a swarm
    decode_ceiling: list[float] = field(default_factory=list)

    @property
    def prefill_ratio(self) -> float:
        return statistics.median(a / b for a, b in zip(self.unpipelined, self.pipelined, strict=True))

    @property
    def clients_ratio(self) -> float:
        """Tokens a second of two, as a multiple of one's."""
        return statistics.median(2 * a / b for a, b in zip(self.one_client, self.two_clients, strict=True))


class Bench:
    def __init__(self, options: argparse.Namespace, manifest: Manifest, peer: SwarmClient, ceiling: Ceiling) -> None:
        self._options = options
        self._manifest = manifest
        self._peer = peer
        self._ceiling = ceiling
        self._rng = np.random.default_rng(0)

    async def once(self, into: Samples) -> None:
        options = self._options
        into.unpipelined.append(await self._prefill(1))
        into.pipelined.append(await self._prefill(options.window))
        into.one_client.append(await self._decode(1, into))
        into.two_clients.append(await self._decode(2, into))
        n_chunks = options.prompt_tokens // options.chunk
        into.prefill_ceiling.append(await asyncio.to_thread(self._ceiling.prefill, n_chunks, options.window))
        into.decode_ceiling.append(await asyncio.to_thread(self._ceiling.decode, options.tokens))

    async def _prefill(self, window: int) -> float:
        length = self._options.prompt_tokens
        async with crowd([self._peer], self._scripts(1, length), length, slot_tokens(self._options)) as clients:
            began = time.perf_counter()
            await clients.clients[0].prefill(window)
            return time.perf_counter() - began

    async def _decode(self, n_clients: int, into: Samples) -> float:
        options = self._options
        n_prompt = min(options.chunk, 16)
        scripts = self._scripts(n_clients, n_prompt + options.tokens)
        async with crowd([self._peer], scripts, n_prompt, slot_tokens(options)) as clients:
            await clients.prefill()
            into.numerics_id = clients.clients[0].session.numerics_ids[0]
            return await clients.decode()

    def _scripts(self, count: int, length: int) -> list[list[int]]:
        found: list[list[int]] = self._rng.integers(0, self._manifest.n_vocab, (count, length)).tolist()
        return found


def slot_tokens(options: argparse.Namespace) -> int:
    return max(MIN_SLOT_TOKENS, int(options.prompt_tokens), int(min(options.chunk, 16) + options.tokens))


async def measure(options: argparse.Namespace, manifest: Manifest) -> Samples:
    samples = Samples()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="glm-swarm-bench-")))
        address, pids = await _start(stack, options, manifest, folder)
        for core, pid in zip(sorted(os.sched_getaffinity(0)), pids, strict=False):
            pin(pid, core)
        peer = await stack.enter_async_context(SwarmClient.connect([address]))
        ceiling = Ceiling(options.model, even_spans(manifest, HOPS), options.chunk, slot_tokens(options))
        stack.callback(ceiling.close)
        bench = Bench(options, manifest, peer, ceiling)
        for number in range(options.rounds + 1):
            await bench.once(samples if number else Samples())  # the first round warms up
            print(f"round {number} of {options.rounds} done", file=sys.stderr, flush=True)
    return samples


async def _start(
    stack: AsyncExitStack, options: argparse.Namespace, manifest: Manifest, folder: Path
) -> tuple[str, list[int]]:
    """A swarm of two nodes: its address, and their process ids."""
    spans = even_spans(manifest, HOPS)
    arguments = ["--threads", "1", "--slots", f"2x{slot_tokens(options)}", "--chunk-tokens", str(options.chunk)]
    if options.links is None:
        swarm = local_swarm(options.model, spans, folder, arguments)
        local = await asyncio.to_thread(stack.enter_context, swarm)
        return local.address, [node.process.pid for node in local.nodes]
    linked = await stack.enter_async_context(linked_swarm(options.model, spans, folder, arguments))
    linked.shape(Shape(delay_seconds=options.links / 2e3))  # a way has two ends
    return linked.address, [node.pid for node in linked.nodes]


def record_of(options: argparse.Namespace, manifest: Manifest, samples: Samples) -> Record:
    links = "" if options.links is None else f" --links {options.links:g}"
    if is_slice(options.model):
        what, ratio = "two clients", samples.clients_ratio
    else:
        what, ratio = "prefill", samples.prefill_ratio
    return Record(
        id=record_id("pipelining", options.model),
        claim=f"Over two hops with a core each, chunks sent ahead make prefill {samples.prefill_ratio:.2f} times as"
        f" fast as chunk after chunk, and two clients decode {samples.clients_ratio:.2f} times the tokens of one.",
        command=f"python -m bench.pipelining{model_option(options.model)}{links}"
        f" --prompt-tokens {options.prompt_tokens} --chunk {options.chunk} --window {options.window}"
        f" --tokens {options.tokens} --rounds {options.rounds} --record",
        commit=this_commit(),
        artifact_id=manifest.artifact_id,
        engine_build=samples.numerics_id,
        hardware=this_machine(),
        settings={
            "model": options.model.name,
            "prompt_tokens": options.prompt_tokens,
            "chunk": options.chunk,
            "window": options.window,
            "tokens": options.tokens,
            "rounds": options.rounds,
            "one_way_delay_ms": 0.0 if options.links is None else options.links,
        },
        samples={
            "prefill_unpipelined_seconds": samples.unpipelined,
            "prefill_pipelined_seconds": samples.pipelined,
            "one_client_seconds": samples.one_client,
            "two_clients_seconds": samples.two_clients,
            "in_process_prefill_ratio": samples.prefill_ceiling,
            "in_process_two_clients_ratio": samples.decode_ceiling,
        },
        summary={
            "prefill_ratio": samples.prefill_ratio,
            "two_clients_ratio": samples.clients_ratio,
            "in_process_prefill_ratio": statistics.median(samples.prefill_ceiling),
            "in_process_two_clients_ratio": statistics.median(samples.decode_ceiling),
        },
        target=f"{what} >= {TARGET}",
        verdict="reached" if ratio >= TARGET else "missed",
    )


def report(record: Record) -> str:
    value = record.summary
    return (
        f"prefill, chunks sent ahead: {value['prefill_ratio']:.2f} times the speed of one after the other; "
        f"the same without a swarm: {value['in_process_prefill_ratio']:.2f}\n"
        f"two clients: {value['two_clients_ratio']:.2f} times the tokens a second of one; "
        f"the same without a swarm: {value['in_process_two_clients_ratio']:.2f}\n"
        f"target: {record.target}: {record.verdict}"
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.pipelining", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="GGUF file, for example one of bench.glm_slice (default: SmolLM2-135M)")
    add("--links", type=float, metavar="MS", help="put a link with so much delay, one way, between any two machines")
    add("--prompt-tokens", type=int, default=1024, help="default: %(default)s")
    add("--chunk", type=int, default=64, help="prefill chunk (default: %(default)s)")
    add("--window", type=int, default=4, help="chunks on their way at once (default: %(default)s)")
    add("--tokens", type=int, default=48, help="tokens that a client decodes (default: %(default)s)")
    add("--rounds", type=int, default=3, help="rounds that count (default: %(default)s)")
    add("--record", action="store_true", help="write evidence/pipelining.json, of a bench slice pipelining-glm.json")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.model = options.model or embedded.fetch()
    manifest = load_manifest(options.model)
    if options.prompt_tokens < 2 * options.chunk:
        raise UsageError("--prompt-tokens: a prompt of one chunk has nothing to send ahead; give two chunks or more")
    record = record_of(options, manifest, asyncio.run(measure(options, manifest)))
    print(report(record))
    if options.record:
        print(f"recorded in {record.write()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A long prompt among clients that decode: what it costs them, and what they cost it.

In each round the clients decode alone, the prompt is computed alone, and then both at the same time, over the same
nodes. A token passes every hop and may wait at each for the chunk that is computed there. Chunks take longer as the
prompt's context grows: "one chunk" is what the very chunk that was next to be answered when the token set out takes in
all hops together, as they said when the prompt was alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.crowd import Client, Crowd, crowd
from bench.crowd.naming import model_option, record_id
from bench.record import Record, percentile, this_commit, this_machine
from swarm.artifact import Manifest, embedded, load_manifest
from swarm.client import SwarmClient
from swarm.client.trace import StepTrace
from swarm.local_swarm import even_spans, local_swarm

TARGET_TOKEN = 2.0  # times the quiet p95, plus a chunk
TARGET_PROMPT = 2.5  # times the quiet prompt
SHORT_PROMPT = 16
MIN_SLOT_TOKENS = 256  # a node offers no shorter ones


@dataclass
class Samples:
    """``quiet_tokens`` and ``loud_tokens``: seconds between two tokens, of each client over all rounds."""

    numerics_id: str = ""
    quiet_tokens: list[list[float]] = field(default_factory=list)
    loud_tokens: list[list[float]] = field(default_factory=list)
    quiet_prompt: list[float] = field(default_factory=list)
    loud_prompt: list[float] = field(default_factory=list)
    chunk: list[float] = field(default_factory=list)  # seconds of compute in all hops, of each one in quiet
    beyond: list[list[float]] = field(default_factory=list)  # of ``loud_tokens``, without one chunk

    def worst_p95(self, tokens: Sequence[Sequence[float]]) -> float:
        """Of the client that waits most."""
        return max(percentile(seconds, 0.95) for seconds in tokens)

    @property
    def quiet_p95(self) -> float:
        return self.worst_p95(self.quiet_tokens)

    @property
    def loud_p95(self) -> float:
        return self.worst_p95(self.loud_tokens)

    @property
    def chunk_seconds(self) -> float:
        return statistics.median(self.chunk)

    @property
    def token_ratio(self) -> float:
        """What a token takes beside the prompt, less its chunk, as a multiple of the quiet one."""
        return self.worst_p95(self.beyond) / self.quiet_p95

    @property
    def prompt_ratio(self) -> float:
        pairs = zip(self.loud_prompt, self.quiet_prompt, strict=True)
        return statistics.median(loud / quiet for loud, quiet in pairs)


class Bench:
    def __init__(self, options: argparse.Namespace, manifest: Manifest, peers: Sequence[SwarmClient]) -> None:
        self._options = options
        self._manifest = manifest
        self._peers = peers  # of the clients, and of the prompt
        self._rng = np.random.default_rng(0)

    async def once(self, into: Samples) -> None:
        options = self._options
        into.quiet_tokens = into.quiet_tokens or [[] for _ in range(options.clients)]
        into.loud_tokens = into.loud_tokens or [[] for _ in range(options.clients)]
        into.beyond = into.beyond or [[] for _ in range(options.clients)]
        async with self._crowd(SHORT_PROMPT + options.tokens) as clients:
            await clients.prefill()
            await clients.decode()
            _extend(into.quiet_tokens, clients)
            into.numerics_id = clients.clients[0].session.numerics_ids[0]
        async with self._prompt() as prompt:
            seconds, traces = await _prefill(prompt)
            into.quiet_prompt.append(seconds)
            chunks = [sum(hop.compute_us for hop in trace.hops) / 1e6 for trace in traces]
            into.chunk += chunks
        async with self._crowd(context_tokens(options)) as clients:
            await clients.prefill()
            seconds, chunk_ends = await self._together(clients)
            into.loud_prompt.append(seconds)
            _extend(into.loud_tokens, clients)
            for kept, client in zip(into.beyond, clients.clients, strict=True):
                kept += beyond_a_chunk(client.token_starts, client.token_seconds, chunk_ends, chunks)

    def _crowd(self, n_tokens: int) -> AbstractAsyncContextManager[Crowd]:
        scripts = [self._tokens(n_tokens) for _ in range(self._options.clients)]
        return crowd(self._peers[:1], scripts, SHORT_PROMPT, context_tokens(self._options))

    @asynccontextmanager
    async def _prompt(self) -> AsyncIterator[Client]:
        length = self._options.prompt_tokens
        async with crowd(self._peers[1:], [self._tokens(length)], length, context_tokens(self._options)) as alone:
            yield alone.clients[0]

    async def _together(self, clients: Crowd) -> tuple[float, list[float]]:
        """The clients decode as long as the prompt takes: its seconds, and when its chunks were answered."""
        stop = asyncio.Event()
        async with self._prompt() as prompt, asyncio.TaskGroup() as group:
            for client in clients.clients:
                group.create_task(client.decode_until(stop))
            try:
                return (await _prefill(prompt))[0], prompt.chunk_ends
            finally:
                stop.set()

    def _tokens(self, count: int) -> list[int]:
        found: list[int] = self._rng.integers(0, self._manifest.n_vocab, count).tolist()
        return found


def beyond_a_chunk(
    starts: Sequence[float], seconds: Sequence[float], chunk_ends: Sequence[float], chunk_seconds: Sequence[float]
) -> list[float]:
    """What each token took, less the chunk that was the next to be answered when the token set out."""
    due = [min(bisect_right(chunk_ends, start), len(chunk_ends) - 1) for start in starts]
    return [taken - chunk_seconds[at] for taken, at in zip(seconds, due, strict=True)]


def context_tokens(options: argparse.Namespace) -> int:
    """Room for the prompt; the clients can't have decoded as much when it is done."""
    return max(MIN_SLOT_TOKENS, int(options.prompt_tokens), int(SHORT_PROMPT + options.tokens))


async def _prefill(prompt: Client) -> tuple[float, list[StepTrace]]:
    began = time.perf_counter()
    traces = await prompt.prefill()
    return time.perf_counter() - began, traces


def _extend(into: list[list[float]], clients: Crowd) -> None:
    for kept, client in zip(into, clients.clients, strict=True):
        kept += client.token_seconds


async def measure(options: argparse.Namespace, manifest: Manifest) -> Samples:
    samples = Samples()
    arguments = ["--threads", str(options.threads), "--slots", f"{options.clients + 1}x{context_tokens(options)}"]
    arguments += ["--chunk-tokens", str(options.chunk)]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="glm-swarm-bench-")))
        swarm = local_swarm(options.model, even_spans(manifest, options.hops), folder, arguments)
        address = (await asyncio.to_thread(stack.enter_context, swarm)).address
        peers = [await stack.enter_async_context(SwarmClient.connect([address])) for _ in range(2)]
        bench = Bench(options, manifest, peers)
        for number in range(options.rounds):
            await bench.once(samples)
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    return samples


def record_of(options: argparse.Namespace, manifest: Manifest, samples: Samples) -> Record:
    reached = samples.token_ratio <= TARGET_TOKEN and samples.prompt_ratio <= TARGET_PROMPT
    return Record(
        id=record_id("long-prompt", options.model),
        claim=f"While a prompt of {options.prompt_tokens} tokens is computed, a token of {options.clients} other"
        f" clients takes {samples.token_ratio:.2f} times the quiet time beyond one chunk (p95), and the prompt"
        f" {samples.prompt_ratio:.2f} times its quiet time.",
        command=f"python -m bench.long_prompt{model_option(options.model)} --clients {options.clients}"
        f" --prompt-tokens {options.prompt_tokens} --chunk {options.chunk} --hops {options.hops}"
        f" --tokens {options.tokens} --rounds {options.rounds}"
        f" --threads {options.threads} --record",
        commit=this_commit(),
        artifact_id=manifest.artifact_id,
        engine_build=samples.numerics_id,
        hardware=this_machine(),
        settings={
            "model": options.model.name,
            "clients": options.clients,
            "prompt_tokens": options.prompt_tokens,
            "chunk": options.chunk,
            "hops": options.hops,
            "tokens": options.tokens,
            "rounds": options.rounds,
            "threads": options.threads,
            "one_chunk": "compute, in all hops of the quiet prompt, of the chunk that was due when the token set out",
        },
        samples={
            "quiet_prompt_seconds": samples.quiet_prompt,
            "loud_prompt_seconds": samples.loud_prompt,
            "chunk_compute_seconds": samples.chunk,
            **{f"client_{n}_quiet_token_seconds": seconds for n, seconds in enumerate(samples.quiet_tokens)},
            **{f"client_{n}_loud_token_seconds": seconds for n, seconds in enumerate(samples.loud_tokens)},
            **{f"client_{n}_loud_token_less_chunk_seconds": seconds for n, seconds in enumerate(samples.beyond)},
        },
        summary={
            "quiet_token_p95_ms": 1e3 * samples.quiet_p95,
            "loud_token_p95_ms": 1e3 * samples.loud_p95,
            "loud_token_p95_ms_less_one_chunk": 1e3 * samples.worst_p95(samples.beyond),
            "one_chunk_p50_ms": 1e3 * samples.chunk_seconds,
            "one_chunk_p95_ms": 1e3 * percentile(samples.chunk, 0.95),
            "token_ratio_less_one_chunk": samples.token_ratio,
            "quiet_prompt_seconds": statistics.median(samples.quiet_prompt),
            "loud_prompt_seconds": statistics.median(samples.loud_prompt),
            "prompt_ratio": samples.prompt_ratio,
        },
        target=f"token p95 of the client that waits most <= {TARGET_TOKEN:g} times the quiet one plus one chunk, "
        f"prompt <= {TARGET_PROMPT:g} times its quiet time",
        verdict="reached" if reached else "missed",
    )


def report(record: Record) -> str:
    value = record.summary
    return "\n".join(
        [
            f"a token, p95: {value['quiet_token_p95_ms']:.1f} ms quiet, {value['loud_token_p95_ms']:.1f} ms beside the "
            f"prompt; {value['loud_token_p95_ms_less_one_chunk']:.1f} ms without the chunk that each met (chunks: p50 "
            f"{value['one_chunk_p50_ms']:.1f}, p95 {value['one_chunk_p95_ms']:.1f}): "
            f"{value['token_ratio_less_one_chunk']:.2f} times the quiet one",
            f"the prompt: {value['quiet_prompt_seconds']:.2f} s quiet, {value['loud_prompt_seconds']:.2f} s among "
            f"others: {value['prompt_ratio']:.2f}",
            f"target: {record.target}: {record.verdict}",
        ]
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.long_prompt", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="GGUF file (default: SmolLM2-135M)")
    add("--clients", type=int, default=7, help="that decode (default: %(default)s)")
    add("--prompt-tokens", type=int, default=4096, help="of the one that comes (default: %(default)s)")
    add("--chunk", type=int, default=128, help="its prefill chunk (default: %(default)s)")
    add("--hops", type=int, default=3, help="nodes (default: %(default)s)")
    add("--tokens", type=int, default=48, help="tokens that a client decodes in quiet (default: %(default)s)")
    add("--rounds", type=int, default=2, help="default: %(default)s")
    add("--threads", type=int, default=1, help="threads of each engine (default: %(default)s)")
    add("--record", action="store_true", help="write evidence/long-prompt.json, of a bench slice long-prompt-glm.json")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.model = options.model or embedded.fetch()
    manifest = load_manifest(options.model)
    record = record_of(options, manifest, asyncio.run(measure(options, manifest)))
    print(report(record))
    if options.record:
        print(f"recorded in {record.write()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

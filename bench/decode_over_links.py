"""What distance costs: tokens per second through a chain whose machines are a one-way delay apart.

One swarm serves all delays, which take turns, so that noise of the machine meets all alike. A token passes a link to
each hop, and one on its way back.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.links import Shape
from bench.links.linked_swarm import linked_swarm
from bench.record import Record, this_commit, this_machine
from swarm.artifact import Manifest, embedded, load_manifest
from swarm.client import LastingSession, StepRequest, SwarmClient, WantedRow
from swarm.local_swarm import even_spans
from swarm.protocol import pb

CONTEXT_TOKENS = 512
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Measured:
    numerics_id: str
    token_seconds: dict[float, list[float]]  # by one-way delay in ms

    def median_ms(self, delay_ms: float) -> float:
        return statistics.median(self.token_seconds[delay_ms]) * 1e3


async def measure(options: argparse.Namespace, manifest: Manifest) -> Measured:
    samples: dict[float, list[float]] = {delay: [] for delay in options.delays_ms}
    arguments = ["--threads", str(options.threads), "--slots", f"1x{CONTEXT_TOKENS}", "--chunk-tokens", "64"]
    with tempfile.TemporaryDirectory(prefix="glm-swarm-bench-") as folder:
        spans = even_spans(manifest, options.hops)
        async with (
            linked_swarm(options.model, spans, Path(folder), arguments) as swarm,
            SwarmClient.connect([swarm.address]) as client,
            await client.open_session(CONTEXT_TOKENS) as session,
        ):
            for round_number in range(options.rounds + 1):
                for delay_ms, kept in samples.items():
                    swarm.shape(Shape(delay_seconds=delay_ms / 2e3))  # a way has two ends
                    taken = await decode(session, manifest.n_vocab, options.tokens)
                    kept.extend(taken if round_number else ())  # the first round warms up
                print(f"round {round_number} of {options.rounds} done", file=sys.stderr, flush=True)
            return Measured(session.numerics_ids[0], samples)


async def decode(session: LastingSession, n_vocab: int, n_tokens: int) -> list[float]:
    """Seconds of each token after a short prompt."""
    tokens = np.random.default_rng(0).integers(0, n_vocab, PROMPT_TOKENS + n_tokens).tolist()
    await session.step(StepRequest(0, tokens[:PROMPT_TOKENS], pb.PREFILL, WantedRow()))
    seconds = []
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + n_tokens):
        began = time.perf_counter()
        await session.step(StepRequest(position, tokens[position : position + 1], pb.DECODE, WantedRow()))
        seconds.append(time.perf_counter() - began)
    return seconds


def record_of(options: argparse.Namespace, manifest: Manifest, measured: Measured) -> Record:
    nearest, farthest = min(options.delays_ms), max(options.delays_ms)
    links = options.hops + 1
    per_link = (measured.median_ms(farthest) - measured.median_ms(nearest)) / links
    delays = " ".join(f"{delay:g}" for delay in options.delays_ms)
    return Record(
        id="decode-over-links",
        claim=f"Over {options.hops} hops, {farthest - nearest:g} ms one way cost a token {per_link:.1f} ms a link.",
        command=f"python -m bench.decode_over_links --delays-ms {delays} --hops {options.hops}"
        f" --tokens {options.tokens} --rounds {options.rounds} --threads {options.threads} --record",
        commit=this_commit(),
        artifact_id=manifest.artifact_id,
        engine_build=measured.numerics_id,
        hardware=this_machine(),
        settings={
            "model": options.model.name,
            "hops": options.hops,
            "tokens": options.tokens,
            "rounds": options.rounds,
            "threads": options.threads,
        },
        samples={f"{delay:g}_ms_token_seconds": seconds for delay, seconds in measured.token_seconds.items()},
        summary={f"{delay:g}_ms_tokens_per_second": 1e3 / measured.median_ms(delay) for delay in options.delays_ms}
        | {"added_per_link_ms": per_link},
        target="none: the links decide",
        verdict="no target",
    )


def report(measured: Measured, links: int) -> str:
    """A table; the last column is what remains when the links are taken off."""
    lines = [f"{'one way, ms':>12}{'tokens/s':>10}{'ms a token':>12}{f'less {links} links':>14}"]
    for delay_ms in measured.token_seconds:
        token_ms = measured.median_ms(delay_ms)
        lines.append(f"{delay_ms:12g}{1e3 / token_ms:10.2f}{token_ms:12.1f}{token_ms - links * delay_ms:14.1f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decode_over_links", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file (default: SmolLM2-135M)")
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 5.0, 20.0, 50.0], help="one way")
    parser.add_argument("--hops", type=int, default=3, help="nodes of the chain (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per delay and round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write evidence/decode-over-links.json")
    options = parser.parse_args(arguments)
    options.model = options.model or embedded.fetch()
    manifest = load_manifest(options.model)
    measured = asyncio.run(measure(options, manifest))
    print(report(measured, options.hops + 1))
    if options.record:
        print(f"recorded in {record_of(options, manifest, measured).write()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

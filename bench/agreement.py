"""How far the swarm's logits are from Transformers' in f32: by weights (f32 or as quantised) and by type of KV cache.

Each prompt goes through a chain of real nodes token by token, and every row is compared with the row that Transformers
computes from the dequantised weights. ``rounding`` is Transformers beside itself with more exact rotary angles: what
one can't ask of another program. Nothing is asserted here: tests/transformers does that for f32.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench import glm_prompts, glm_transformers
from bench.gguf_weights import Array, write_f32
from bench.record import Record, this_commit, this_machine
from shim.vocab import Vocab
from swarm.artifact import load_manifest
from swarm.artifact.catalog import GLM_TINY, find_model
from swarm.client import LastingSession, StepRequest, SwarmClient, WantedRow
from swarm.local_swarm import local_swarm
from swarm.protocol import pb

VARIANTS = ("f32/f32", "f32/f16", "quantised/f32", "quantised/f16", "quantised/q8_0")  # weights/KV
ROUNDING = "rounding"

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """What is compared. ``model`` is a name or a path, ``cuts`` are the inner ends of the chain's spans."""

    model: str
    prompts: int
    tokens: int
    cuts: tuple[int, ...]
    variants: tuple[str, ...]
    threads: int

    @property
    def command(self) -> str:
        cuts = ",".join(map(str, self.cuts))
        return (
            f"python -m bench.agreement --model {shlex.quote(self.model)} --prompts {self.prompts} "
            f"--tokens {self.tokens} --cuts {cuts} --variants {' '.join(self.variants)} --threads {self.threads} "
            "--record"
        )


@dataclass
class Agreement:
    """Figures of every row compared, in order."""

    kl: list[float] = field(default_factory=list)  # Kullback-Leibler divergence from Transformers' distribution, nats
    difference: list[float] = field(default_factory=list)  # largest of any logit
    same_top: list[float] = field(default_factory=list)  # 1 where the most likely token is the same

    def add(self, expected: Array, found: Array) -> None:
        """Both [n, n_vocab]."""
        theirs, ours = _log_softmax(expected), _log_softmax(found)
        self.kl += [max(0.0, float(value)) for value in np.sum(np.exp(theirs) * (theirs - ours), axis=1)]
        self.difference += np.abs(expected - found).max(axis=1).tolist()
        self.same_top += (expected.argmax(axis=1) == found.argmax(axis=1)).astype(float).tolist()

    @property
    def summary(self) -> dict[str, float]:
        return {
            "top1_agreement": float(np.mean(self.same_top)),
            "kl_mean": float(np.mean(self.kl)),
            "kl_max": max(self.kl),
            "logit_difference_median": float(np.median(self.difference)),
            "logit_difference_max": max(self.difference),
        }


def measure(work: Work) -> Record:
    model = find_model(work.model).path
    manifest = load_manifest(model)
    spans = list(pairwise([0, *work.cuts, manifest.n_layers]))
    with Vocab.load(model) as vocabulary:
        prompts = glm_prompts.prompts(vocabulary, work.prompts, work.tokens)
    with tempfile.TemporaryDirectory(prefix="glm-swarm-bench-") as name:
        folder = Path(name)
        files = {"f32": write_f32(model, folder / "f32.gguf"), "quantised": model}
        found = {ROUNDING: Agreement()}
        checkpoint = glm_transformers.write_checkpoint(model, folder / "checkpoint")
        expected = _ask_transformers(checkpoint, prompts, found[ROUNDING])
        build = ""
        for variant in work.variants:
            print(f"{variant}: {len(spans)} nodes", file=sys.stderr, flush=True)
            weights, kv = variant.split("/")
            nodes = folder / variant.replace("/", "-")
            nodes.mkdir()
            options = ["--kv-type", kv, "--slots", f"1x{_cells(work.tokens)}", "--threads", str(work.threads)]
            with local_swarm(files[weights], spans, nodes, options) as swarm:
                rows, build = asyncio.run(_ask_chain(swarm.address, prompts, len(spans)))
            found[variant] = Agreement()
            for theirs, ours in zip(expected, rows, strict=True):
                found[variant].add(theirs, ours)
    return _record(work, manifest.artifact_id, build, found)


def _ask_transformers(checkpoint: Path, prompts: Sequence[tuple[int, ...]], rounding: Agreement) -> list[Array]:
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is here; read by Transformers when it is imported
    print("Transformers", file=sys.stderr, flush=True)
    model = glm_transformers.load(checkpoint)
    expected = [glm_transformers.logits(model, tokens) for tokens in prompts]
    with glm_transformers.angles_from_f64(model):
        for tokens, rows in zip(prompts, expected, strict=True):
            rounding.add(rows, glm_transformers.logits(model, tokens))
    return expected


async def _ask_chain(address: str, prompts: Sequence[tuple[int, ...]], n_hops: int) -> tuple[list[Array], str]:
    """Logits [n, n_vocab] of each prompt, and the engine build of the exit."""
    async with SwarmClient.connect([address]) as client:
        session = await client.open_session(len(prompts[0]) + 1)
        async with session:
            assert len(session.places) == n_hops
            rows = [np.stack([await _row(session, tokens, at) for at in range(len(tokens))]) for tokens in prompts]
            return rows, session.numerics_ids[-1].rpartition("/")[0]


async def _row(session: LastingSession, tokens: tuple[int, ...], position: int) -> Array:
    # a step at position 0 drops what the session held before
    await session.step(StepRequest(position, tokens[position : position + 1], pb.DECODE, WantedRow(top=1)))
    return await session.fetch_row(position)


def _cells(tokens: int) -> int:
    return -(-(tokens + 1) // 256) * 256


def _log_softmax(rows: Array) -> Doubles:
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    logs: Doubles = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


def _record(work: Work, artifact_id: str, build: str, found: dict[str, Agreement]) -> Record:
    summary: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    for variant, agreement in found.items():
        name = variant.replace("/", "_")
        summary |= {f"{name}_{figure}": value for figure, value in agreement.summary.items()}
        samples[f"{name}_kl_nats"] = _rounded(agreement.kl)
        samples[f"{name}_logit_difference"] = _rounded(agreement.difference)
        samples[f"{name}_same_top1"] = agreement.same_top
    return Record(
        id="agreement",
        claim=_claim(found),
        command=work.command,
        commit=this_commit(),
        artifact_id=artifact_id,
        engine_build=build,
        hardware=this_machine(),
        settings={
            "model": Path(work.model).name,
            "prompts": work.prompts,
            "tokens": work.tokens,
            "cuts": ",".join(map(str, work.cuts)),
            "threads": work.threads,
        },
        samples=samples,
        summary=summary,
        target="none; f32 weights with f32 KV are held to 1e-3 in tests/transformers",
        verdict="no target",
    )


def _claim(found: dict[str, Agreement]) -> str:
    last = next(reversed(found))
    weights, kv = last.split("/") if "/" in last else (last, "f32")
    figures = found[last].summary
    return (
        f"Through the chain, {weights} weights with {kv} KV name the same most likely token as Transformers in f32 in "
        f"{figures['top1_agreement']:.1%} of {len(found[last].kl)} rows, at a mean divergence of "
        f"{figures['kl_mean']:.2g} nats."
    )


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.3g}") for value in values]


def report(record: Record, variants: Sequence[str]) -> str:
    """The record's summary as a table."""
    lines = [f"{'weights/KV':16}{'top-1':>8}{'KL mean':>11}{'KL max':>11}{'logits median':>15}{'max':>11}"]
    for variant in variants:
        name = variant.replace("/", "_")
        top, mean, most, median, largest = (
            record.summary[f"{name}_{figure}"]
            for figure in ("top1_agreement", "kl_mean", "kl_max", "logit_difference_median", "logit_difference_max")
        )
        lines.append(f"{variant:16}{top:8.4f}{mean:11.2e}{most:11.2e}{median:15.2e}{largest:11.2e}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.agreement", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=GLM_TINY, help="a glm-dsa model: its name or file (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=288, help="length of each prompt (default: %(default)s)")
    parser.add_argument("--cuts", default="2,6", help="where the chain is cut (default: %(default)s)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="weights/KV (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write evidence/agreement.json")
    options = parser.parse_args(arguments)
    cuts = tuple(int(cut) for cut in options.cuts.split(",") if cut)
    variants = tuple(options.variants)
    record = measure(Work(options.model, options.prompts, options.tokens, cuts, variants, options.threads))
    print(report(record, (ROUNDING, *variants)))
    if options.record:
        print(f"recorded in {record.write()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

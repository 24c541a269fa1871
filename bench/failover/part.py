"""What the parts of the benchmark have in common: how one is asked for and what it leaves."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bench.failover.stage import Setting, Stage
from bench.record import Record, this_commit, this_machine

Verdict = Literal["reached", "missed", "no target"]


@dataclass(frozen=True)
class Part:
    """``context_tokens`` of its longest session; ``settings`` names the options that decide the figures."""

    name: str
    help: str
    settings: tuple[str, ...]
    add_options: Callable[[argparse.ArgumentParser], None]
    context_tokens: Callable[[argparse.Namespace], int]
    measure: Callable[[Stage, argparse.Namespace], Awaitable[Findings]]
    report: Callable[[Record], str]


@dataclass(frozen=True)
class Findings:
    claim: str
    samples: Mapping[str, Sequence[float]]
    summary: Mapping[str, float]
    numerics_id: str
    target: str = "none"
    verdict: Verdict = "no target"


SMALLEST_SLOT = 256  # that a node takes
COMMON = ("hops", "replicas", "threads", "chunk_tokens", "seed")


def record_of(part: Part, options: argparse.Namespace, stage: Stage, findings: Findings) -> Record:
    settings: dict[str, str | int | float | bool] = {"model": stage.setting.model.name}
    command = f"python -m bench.failover {part.name}"
    for name in (*COMMON, *part.settings):
        value = getattr(options, name)
        words = " ".join(f"{one:g}" for one in value) if isinstance(value, list) else value
        settings[name] = words
        command += f" --{name.replace('_', '-')} {words}"
    return Record(
        id=f"failover-{part.name}",
        claim=findings.claim,
        command=f"{command} --record",
        commit=this_commit(),
        artifact_id=stage.manifest.artifact_id,
        engine_build=findings.numerics_id,
        hardware=this_machine(),
        settings=settings,
        samples={name: list(values) for name, values in findings.samples.items()},
        summary=dict(findings.summary),
        target=findings.target,
        verdict=findings.verdict,
    )


def setting_of(part: Part, options: argparse.Namespace, cache_dir: Path | None = None) -> Setting:
    return Setting(
        model=options.model,
        hops=options.hops,
        replicas=options.replicas,
        threads=options.threads,
        slots=f"{options.slots}x{max(part.context_tokens(options), SMALLEST_SLOT)}",
        chunk_tokens=options.chunk_tokens,
        cache_dir=cache_dir,
    )


def prompt_of(stage: Stage, n_tokens: int, seed: int) -> list[int]:
    """Drawn tokens: an answer of a wanted length needs no sense."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, stage.manifest.n_vocab, n_tokens).tolist()
    return drawn

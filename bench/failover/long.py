"""A death deep in a long context: with a replay of everything, and with a copy that was kept on another node."""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import AsyncIterator

from bench.failover.answer import Answered
from bench.failover.contender import Contender, recovery, standing_by
from bench.failover.part import Findings, Part, prompt_of
from bench.failover.pause import PARTS, Pause, paused
from bench.failover.stage import Stage, tell
from bench.record import Record
from swarm.errors import SwarmError

REPLAY, STANDBY = "replay", "standby"
AT = 12  # the answer's token at which a hop dies


async def measure(stage: Stage, options: argparse.Namespace) -> Findings:
    prompt = prompt_of(stage, options.prompt_tokens, options.seed)
    pauses: dict[str, list[Pause]] = {}
    first: Answered | None = None
    async with _contenders(stage, options) as contenders:
        for number in range(options.rounds):
            for name, contender in contenders.items():
                await stage.whole()
                hop = (1 + number) % stage.n_hops  # the middle first
                pause, answered = await paused(stage, contender, hop, prompt, at=AT, seed=options.seed + number)
                first = first or answered
                if answered.tokens != first.tokens:
                    raise SwarmError(f"the answer with {name} is another one; run it again with --rounds 1")
                pauses.setdefault(name, []).append(pause)
                tell(f"round {number + 1} of {options.rounds}, {name}: {pause}")
    assert first is not None
    return _findings(pauses, first.numerics_ids[0], options)


@contextlib.asynccontextmanager
async def _contenders(stage: Stage, options: argparse.Namespace) -> AsyncIterator[dict[str, Contender]]:
    replaying = {REPLAY: recovery(stage)}
    if options.without_standby:
        yield replaying
        return
    async with stage.standby_client() as client:
        yield replaying | {STANDBY: standing_by(client)}


def _findings(pauses: dict[str, list[Pause]], numerics_id: str, options: argparse.Namespace) -> Findings:
    samples: dict[str, list[float]] = {}
    summary: dict[str, float] = {}
    for name, of_name in pauses.items():
        for part in (*PARTS, "whole", "overhead"):
            seconds = samples[f"{name}_{part}_seconds"] = [getattr(pause, part) for pause in of_name]
            summary[f"{name}_{part}_seconds_p50"] = statistics.median(seconds)
        samples[f"{name}_hop"] = [float(pause.hop) for pause in of_name]
        tokens = samples[f"{name}_recomputed_tokens"] = [float(pause.recomputed_tokens) for pause in of_name]
        summary[f"{name}_recomputed_tokens_p50"] = statistics.median(tokens)
    replay = summary["replay_whole_seconds_p50"]
    claim = (
        f"At {options.prompt_tokens} tokens of context a killed hop stops an answer for {replay:.1f} s with a replay"
    )
    if STANDBY not in pauses:
        return Findings(f"{claim}.", samples, summary, numerics_id, "none: standby was not measured")
    standby = summary["standby_whole_seconds_p50"]
    summary["standby_share_of_replay"] = standby / replay
    return Findings(
        claim=f"{claim} and for {standby:.2f} s with a standby copy.",
        samples=samples,
        summary=summary,
        numerics_id=numerics_id,
        target="with standby the pause is shorter than with a replay, every time",
        verdict="reached" if max(samples["standby_whole_seconds"]) < min(samples["replay_whole_seconds"]) else "missed",
    )


def report(record: Record) -> str:
    names = [name for name in (REPLAY, STANDBY) if f"{name}_whole_seconds" in record.samples]
    lines = [f"{'p50, s':<14}" + "".join(f"{name:>10}" for name in names)]
    for part in (*PARTS, "whole", "overhead"):
        cells = "".join(f"{record.summary[f'{name}_{part}_seconds_p50']:10.2f}" for name in names)
        lines.append(f"{part:<14}{cells}")
    tokens = "".join(f"{record.summary[f'{name}_recomputed_tokens_p50']:10.0f}" for name in names)
    lines.append(f"{'tokens again':<14}{tokens}")
    return "\n".join([*lines, f"target: {record.target}: {record.verdict}"])


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=7900, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="deaths of each kind (default: %(default)s)")
    parser.add_argument("--without-standby", action="store_true", help="measure the replay alone")


LONG = Part(
    name="long",
    help="a death in a long context (8k tokens), with replay and with standby",
    about=__doc__,
    settings=("prompt_tokens", "rounds", "without_standby"),
    add_options=_add_options,
    context_tokens=lambda options: options.prompt_tokens + 32,
    measure=measure,
    report=report,
)

"""The pause that a ``kill -9`` makes in an answer, taken apart.

It lasts from the kill to the next token and is the sum of four parts: *noticing*, from the kill to the client's first
failure; *planning*, until all hops are under a new route; *recomputing*, what the hop with the most to do spent in its
engine; and the *rest*: the replay's way through the hops and the step that was under way.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.failover.answer import Answered, Answering, Strike
from bench.failover.contender import Contender, recovery
from bench.failover.part import Findings, Part, prompt_of
from bench.failover.plan import At
from bench.failover.stage import Stage, tell
from bench.record import Record, percentile
from swarm.client.trace import RecoveryTrace
from swarm.errors import SwarmError

TARGET_SECONDS = 1.0  # for all but recomputing
PARTS = ("noticing", "planning", "recomputing", "rest")


@dataclass(frozen=True)
class Pause:
    """Seconds."""

    hop: int
    position: int
    noticing: float
    planning: float
    recomputing: float
    rest: float
    recomputed_tokens: int  # by the hop that took over; what a copy held is not among them

    @property
    def whole(self) -> float:
        return self.noticing + self.planning + self.recomputing + self.rest

    @property
    def overhead(self) -> float:
        return self.whole - self.recomputing

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {getattr(self, name) * 1e3:.0f}" for name in PARTS)
        return f"hop {self.hop} at {self.position}: {self.whole * 1e3:.0f} ms ({parts})"


def pause_of(answered: Answered, strike: Strike) -> Pause:
    """A recovery is booked in the moment the step's answer comes: from there its parts lead back to its beginning.
    Raises SwarmError when nobody noticed the death."""
    for trace in answered.recoveries:
        ended = answered.ended.get(trace.position, 0.0)
        if ended > strike.moment and strike.peer_id in {peer for peer, _ in trace.lost}:
            began = ended - trace.planning_seconds - trace.replay_seconds
            rest = max(trace.replay_seconds - trace.recompute_seconds, 0.0)
            return Pause(
                hop=strike.hop,
                position=trace.position,
                noticing=began - strike.moment,
                planning=trace.planning_seconds,
                recomputing=trace.replay_seconds - rest,
                rest=rest,
                recomputed_tokens=replayed_tokens(trace),
            )
    raise SwarmError(f"nobody noticed the death of {strike.peer_id}; give the answer more tokens after it")


def replayed_tokens(trace: RecoveryTrace) -> int:
    """All before, unless the trace knows better: a standby's copy holds most of them."""
    return getattr(trace, "replayed_tokens", trace.position)


async def paused(
    stage: Stage, contender: Contender, hop: int, prompt: Sequence[int], *, at: int, seed: int
) -> tuple[Pause, Answered]:
    """One answer in which ``hop`` dies around token ``at``, which ends a few tokens later."""
    answered = await Answering(stage, contender, At({at: hop}), seed=seed).answer(prompt, at + 8)
    if not answered.strikes:
        raise SwarmError("the answer ended before the kill; give it more tokens")
    return pause_of(answered, answered.strikes[0]), answered


async def measure(stage: Stage, options: argparse.Namespace) -> Findings:
    contender = recovery(stage)
    prompt = prompt_of(stage, options.prompt_tokens, options.seed)
    drawn = random.Random(options.seed)
    pauses: list[Pause] = []
    for number in range(options.kills):
        await stage.whole()
        at = drawn.randint(8, 24)
        pause, answered = await paused(
            stage, contender, number % stage.n_hops, prompt, at=at, seed=drawn.getrandbits(32)
        )
        pauses.append(pause)
        tell(f"kill {number + 1} of {options.kills}: {pause}")
    return _findings(stage, pauses, answered.numerics_ids[0], options)


def _findings(stage: Stage, pauses: Sequence[Pause], numerics_id: str, options: argparse.Namespace) -> Findings:
    overheads = [pause.overhead for pause in pauses]
    samples = {f"{name}_seconds": [getattr(pause, name) for pause in pauses] for name in (*PARTS, "whole", "overhead")}
    summary: dict[str, float] = {}
    for name, values in samples.items():
        summary |= {f"{name}_p50": percentile(values, 0.5), f"{name}_max": max(values)}
    for hop in range(stage.n_hops):
        of_hop = [pause.overhead for pause in pauses if pause.hop == hop]
        summary |= {f"hop_{hop}_overhead_seconds_p50": percentile(of_hop, 0.5)} if of_hop else {}
    return Findings(
        claim=f"A hop killed at {options.prompt_tokens} tokens of context stops an answer for "
        f"{summary['whole_seconds_p50'] * 1e3:.0f} ms in the median, {summary['recomputing_seconds_p50'] * 1e3:.0f} ms "
        "of them spent computing again.",
        samples=samples | {"hop": [float(pause.hop) for pause in pauses]},
        summary=summary,
        numerics_id=numerics_id,
        target=f"the pause without recomputing < {TARGET_SECONDS:g} s, every time",
        verdict="reached" if max(overheads) < TARGET_SECONDS else "missed",
    )


def report(record: Record) -> str:
    lines = [f"{'part of the pause':<20}{'p50, ms':>10}{'max, ms':>10}"]
    for name in (*PARTS, "whole", "overhead"):
        p50, most = (record.summary[f"{name}_seconds_{what}"] * 1e3 for what in ("p50", "max"))
        lines.append(f"{name:<20}{p50:10.0f}{most:10.0f}")
    return "\n".join([*lines, f"target: {record.target}: {record.verdict}"])


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=12, help="entry, middle and exit in turn (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=384, help="default: %(default)s")


PAUSE = Part(
    name="pause",
    help="the pause of a kill -9: noticing, planning, recomputing, rest",
    settings=("kills", "prompt_tokens"),
    add_options=_add_options,
    context_tokens=lambda options: options.prompt_tokens + 64,
    measure=measure,
    report=report,
)

"""Tokens per second of an answer in which nobody, one hop or several hops die."""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, field

from bench.failover.answer import Answered, Answering
from bench.failover.contender import RECOVERY, RESTART, Contender, recovery, restart
from bench.failover.part import Findings, Part, prompt_of
from bench.failover.plan import At, spread
from bench.failover.stage import Stage, tell
from bench.record import Record
from swarm.errors import SwarmError

Case = tuple[int, str]  # deaths, contender


@dataclass
class Runs:
    """Answers by case. Every one must have the same tokens."""

    by_case: dict[Case, list[Answered]] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()

    def add(self, case: Case, answered: Answered) -> None:
        """Raises SwarmError when the answer is another."""
        self.tokens = self.tokens or answered.tokens
        if answered.tokens != self.tokens:
            at = next(
                i for i, (one, other) in enumerate(zip(self.tokens, answered.tokens, strict=True)) if one != other
            )
            raise SwarmError(
                f"token {at} of an answer with {case[0]} deaths ({case[1]}) is another than in the first one; "
                "run it again with --hops 1 and compare the nodes' numerics"
            )
        self.by_case.setdefault(case, []).append(answered)

    def rate(self, case: Case) -> float:
        return statistics.median(answered.tokens_per_second for answered in self.by_case[case])


async def measure(stage: Stage, options: argparse.Namespace) -> Findings:
    runs = Runs()
    contenders = {RECOVERY: recovery(stage), RESTART: restart(stage)}
    order = random.Random(options.seed)
    await Answering(stage, contenders[RECOVERY], At({})).answer(prompt_of(stage, 32, options.seed), 8)  # warms up
    for number in range(options.rounds):
        cases = [(n_deaths, name) for n_deaths in options.deaths for name in contenders]
        order.shuffle(cases)
        for case in cases:
            await stage.whole()
            answered = await _answer(stage, contenders[case[1]], case[0], number, options)
            runs.add(case, answered)
            tell(
                f"round {number + 1} of {options.rounds}: {case[0]} deaths, {case[1]}: "
                f"{answered.tokens_per_second:.1f} tokens/s, {answered.steps} steps"
            )
    return _findings(runs, options)


async def _answer(
    stage: Stage, contender: Contender, n_deaths: int, number: int, options: argparse.Namespace
) -> Answered:
    """The same prompt every time; both contenders meet the same deaths."""
    plan = At(spread(n_deaths, options.tokens, stage.n_hops, options.seed + number))
    answering = Answering(stage, contender, plan, seed=options.seed + number)
    answered = await answering.answer(prompt_of(stage, options.prompt_tokens, options.seed), options.tokens)
    if len(answered.strikes) != n_deaths:
        raise SwarmError(f"{len(answered.strikes)} hops died instead of {n_deaths}; give the answer more --tokens")
    return answered


def _findings(runs: Runs, options: argparse.Namespace) -> Findings:
    samples: dict[str, list[float]] = {}
    summary: dict[str, float] = {}
    for (n_deaths, name), answers in runs.by_case.items():
        key = f"{n_deaths}_deaths_{name}"
        samples[f"{key}_seconds"] = [answered.seconds for answered in answers]
        samples[f"{key}_steps"] = [float(answered.steps) for answered in answers]
        summary[f"{key}_tokens_per_second"] = runs.rate((n_deaths, name))
    undisturbed = runs.rate((min(options.deaths), RECOVERY))
    for case in runs.by_case:
        summary[f"{case[0]}_deaths_{case[1]}_share"] = runs.rate(case) / undisturbed
    most = max(options.deaths)
    kept = {name: runs.rate((most, name)) / undisturbed for name in (RECOVERY, RESTART)}
    first = next(iter(runs.by_case.values()))[0]
    return Findings(
        claim=f"With {most} of its hops killed in {options.tokens} tokens an answer keeps {kept[RECOVERY]:.0%} of its "
        f"speed, beginning again {kept[RESTART]:.0%}; all answers have the same tokens.",
        samples=samples,
        summary=summary,
        numerics_id=first.numerics_ids[0],
        target="none: how long a replay takes depends on the model",
    )


def report(record: Record) -> str:
    value = record.summary
    lines = [f"{'deaths':>8}{'':>4}{'tokens/s':>10}{'share':>8}{'steps':>8}"]
    for n_deaths in map(int, str(record.settings["deaths"]).split()):
        for name in (RECOVERY, RESTART):
            key = f"{n_deaths}_deaths_{name}"
            steps = statistics.median(record.samples[f"{key}_steps"])
            rate, share = value[f"{key}_tokens_per_second"], value[f"{key}_share"]
            lines.append(f"{n_deaths:8} {name:<9}{rate:8.1f}{share:8.0%}{steps:8.0f}")
    return "\n".join(lines)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deaths", type=int, nargs="+", default=[0, 1, 3], help="per answer (default: 0 1 3)")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="answers of each kind (default: %(default)s)")


DEATHS = Part(
    name="deaths",
    help="tokens/s of an answer in which hops die, and of one that begins again",
    about=__doc__,
    settings=("deaths", "tokens", "prompt_tokens", "rounds"),
    add_options=_add_options,
    context_tokens=lambda options: options.prompt_tokens + options.tokens,
    measure=measure,
    report=report,
)

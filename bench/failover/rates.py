"""Throughput when hops die at random: in every decode step one hop with a given probability.

A node that died is replaced, while the clock stands, as soon as its span's last node is to die: there are replicas
whenever one is needed, and starting them costs the answers nothing, as on a swarm of many machines. Both contenders
meet the same chances. Tokens count when their answer is finished.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.failover.answer import Answering
from bench.failover.contender import RECOVERY, RESTART, Contender, recovery, restart
from bench.failover.part import Findings, Part, prompt_of
from bench.failover.plan import At, Chance, steps_of_restarting
from bench.failover.stage import Stage, tell
from bench.record import Record

TARGET_KEPT = 0.7
TARGET_LEFT = 0.5


@dataclass
class Flow:
    """What came out of one contender at one rate."""

    tokens: int = 0  # of finished answers
    seconds: float = 0.0
    steps: int = 0
    deaths: int = 0
    numerics_id: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:.1f} tokens/s, {self.tokens} tokens in {self.steps} steps, {self.deaths} deaths"
        )


Flows = dict[tuple[float, str], Flow]


async def measure(stage: Stage, options: argparse.Namespace) -> Findings:
    contenders = {RECOVERY: recovery(stage), RESTART: restart(stage)}
    await Answering(stage, contenders[RECOVERY], At({})).answer(prompt_of(stage, 32, options.seed), 8)  # warms up
    flows: Flows = {(rate, name): Flow() for rate in options.rates for name in contenders}
    chances = {case: Chance(case[0], stage.n_hops, options.seed) for case in flows}
    for number in range(math.ceil(options.total / options.tokens)):
        for case, flow in flows.items():
            if flow.steps < options.max_steps:
                await _answer(stage, contenders[case[1]], chances[case], flow, number, options)
                tell(f"answer {number + 1}, {case[0]:g} deaths a step, {case[1]}: {flow}")
    return _findings(flows, options)


async def _answer(
    stage: Stage, contender: Contender, chance: Chance, flow: Flow, number: int, options: argparse.Namespace
) -> None:
    await stage.whole()
    left = options.max_steps - flow.steps
    answering = Answering(stage, contender, chance, seed=options.seed + number, max_steps=left)
    prompt = prompt_of(stage, options.prompt_tokens, options.seed + number)
    answered = await answering.answer(prompt, options.tokens)
    flow.tokens += len(answered.tokens) if answered.finished else 0
    flow.seconds += answered.seconds
    flow.steps += answered.steps
    flow.deaths += len(answered.strikes)
    flow.numerics_id = flow.numerics_id or next(iter(answered.numerics_ids), "")


def _findings(flows: Flows, options: argparse.Namespace) -> Findings:
    calm, worst = min(options.rates), max(options.rates)
    shares = {case: flow.tokens_per_second / flows[calm, case[1]].tokens_per_second for case, flow in flows.items()}
    samples: dict[str, list[float]] = {"rate": list(options.rates)}
    for name in (RECOVERY, RESTART):
        of_name = [flows[rate, name] for rate in options.rates]
        samples |= {
            f"{name}_tokens": [float(flow.tokens) for flow in of_name],
            f"{name}_seconds": [flow.seconds for flow in of_name],
            f"{name}_steps": [float(flow.steps) for flow in of_name],
            f"{name}_deaths": [float(flow.deaths) for flow in of_name],
        }
    summary = dict(_summary(flows, shares, options))
    reached = shares[worst, RECOVERY] >= TARGET_KEPT and shares[worst, RESTART] < TARGET_LEFT
    return Findings(
        claim=f"When a hop dies in one step of {1 / worst:.0f}, answers of {options.tokens} tokens come at "
        f"{shares[worst, RECOVERY]:.0%} of their undisturbed rate, and at {shares[worst, RESTART]:.0%} of it when they "
        "begin again.",
        samples=samples,
        summary=summary,
        numerics_id=flows[calm, RECOVERY].numerics_id,
        target=f"at {worst:g} deaths a step recovery keeps >= {TARGET_KEPT:.0%}, restarting < {TARGET_LEFT:.0%}",
        verdict="reached" if reached else "missed",
    )


def _summary(
    flows: Flows, shares: dict[tuple[float, str], float], options: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    for rate, name in flows:
        yield f"{rate:g}_{name}_tokens_per_second", flows[rate, name].tokens_per_second
        yield f"{rate:g}_{name}_share", shares[rate, name]
    for rate in options.rates:
        # by steps alone, as if noticing a death, opening a session and the prompt took no time
        yield f"{rate:g}_restart_share_expected", options.tokens / steps_of_restarting(rate, options.tokens)


def report(record: Record) -> str:
    value = record.summary
    lines = [f"{'deaths a step':>14}{'recovery':>16}{'restart':>16}{'expected':>10}"]
    for rate in record.samples["rate"]:
        cells = "".join(
            f"{value[f'{rate:g}_{name}_tokens_per_second']:8.1f} ({value[f'{rate:g}_{name}_share']:4.0%})"
            for name in (RECOVERY, RESTART)
        )
        lines.append(f"{rate:14g} {cells}{value[f'{rate:g}_restart_share_expected']:10.0%}")
    return "\n".join([*lines, f"target: {record.target}: {record.verdict}"])


def _add_options(parser: argparse.ArgumentParser) -> None:
    rates = [0.0, 1e-4, 1e-3, 1e-2]
    parser.add_argument("--rates", type=float, nargs="+", default=rates, help="deaths a step (default: 0 to 0.01)")
    parser.add_argument("--total", type=int, default=1536, help="tokens per rate (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--max-steps", type=int, default=3000, help="per rate, then it is cut (default: %(default)s)")


RATES = Part(
    name="rates",
    help="finished tokens per second when hops die at random",
    settings=("rates", "total", "tokens", "prompt_tokens", "max_steps"),
    add_options=_add_options,
    context_tokens=lambda options: options.prompt_tokens + options.tokens,
    measure=measure,
    report=report,
)

"""The failover benchmark at toy size: real nodes, real kills, and figures that can be true."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.failover.__main__ import PARTS, parser
from bench.failover.answer import Answered, Strike
from bench.failover.deaths import DEATHS
from bench.failover.long import LONG
from bench.failover.part import Part, record_of
from bench.failover.pause import PAUSE, pause_of
from bench.failover.plan import At, Chance, spread, steps_of_restarting
from bench.failover.rates import RATES
from bench.failover.stage import Setting, Stage, can_stand_by, stage
from bench.record import Record
from swarm.client.trace import RecoveryTrace
from swarm.errors import SwarmError
from swarm.ids import PeerId

on_stage = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def toy(llama_untied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    cache = tmp_path_factory.mktemp("client")
    async with stage(Setting(llama_untied_path, hops=2, slots="2x1024", chunk_tokens=64, cache_dir=cache)) as made:
        yield made


async def measured(toy: Stage, part: Part, *arguments: str) -> Record:
    options = parser().parse_args([part.name, "--hops", "2", *arguments])
    record = record_of(part, options, toy, await part.measure(toy, options))
    assert record.id == f"failover-{part.name}"
    assert len(part.report(record).splitlines()) > 2
    return record


@on_stage
async def test_beginning_again_takes_more_steps(toy: Stage) -> None:
    record = await measured(toy, DEATHS, "--deaths", "0", "1", "--tokens", "32", "--rounds", "1")
    steps = {name: values[0] for name, values in record.samples.items() if name.endswith("_steps")}
    assert steps["0_deaths_recovery_steps"] == steps["1_deaths_recovery_steps"] == 31
    assert steps["1_deaths_restart_steps"] >= 31 + 32 // 8
    assert record.summary["1_deaths_recovery_tokens_per_second"] < record.summary["0_deaths_recovery_tokens_per_second"]
    assert "--deaths 0 1 --tokens 32" in record.command


@on_stage
async def test_a_pause_has_parts(toy: Stage) -> None:
    record = await measured(toy, PAUSE, "--kills", "1", "--prompt-tokens", "200")
    parts = {name: record.samples[f"{name}_seconds"][0] for name in ("noticing", "planning", "recomputing", "rest")}
    assert all(0 < seconds < 60 for seconds in parts.values()), parts
    assert sum(parts.values()) == pytest.approx(record.samples["whole_seconds"][0])


@on_stage
@pytest.mark.slow
async def test_chance_costs_those_most_who_begin_again(toy: Stage) -> None:
    # this seed has one death, at token 10, for either
    record = await measured(toy, RATES, "--rates", "0", "0.1", "--tokens", "16", "--total", "16", "--seed", "9")
    assert record.samples["recovery_tokens"] == record.samples["restart_tokens"] == [16, 16]
    assert record.samples["recovery_deaths"] == record.samples["restart_deaths"] == [0, 1]
    assert record.samples["recovery_steps"] == [15, 15]
    assert record.samples["restart_steps"][0] == 15
    assert record.samples["restart_steps"][1] in (26, 27)  # it dies in that step, or the next one
    assert record.summary["0.1_restart_share_expected"] < 0.5


@on_stage
@pytest.mark.slow
async def test_a_death_in_a_long_context(toy: Stage) -> None:
    record = await measured(toy, LONG, "--prompt-tokens", "600", "--rounds", "1")
    replayed = record.samples["replay_recomputed_tokens"]
    assert 600 <= replayed[0] < 630
    if can_stand_by():
        assert record.samples["standby_recomputed_tokens"][0] < 630 - 512


def test_a_recovery_is_counted_back_from_its_answer() -> None:
    lost = ((PeerId("dead"), (0, 2)),)
    trace = RecoveryTrace(70, lost, (), (), 0.01, 0.25, 1.5, 1, recompute_seconds=1.0)
    answered = Answered(recoveries=[trace], ended={69: 98.0, 70: 102.0})
    pause = pause_of(answered, Strike(hop=1, peer_id="dead", position=69, moment=100.0))
    assert (pause.noticing, pause.planning, pause.recomputing, pause.rest) == (0.25, 0.25, 1.0, 0.5)
    assert (pause.whole, pause.overhead, pause.hop, pause.position) == (2.0, 1.0, 1, 70)
    with pytest.raises(SwarmError, match="nobody noticed"):
        pause_of(answered, Strike(hop=1, peer_id="another", position=69, moment=100.0))


def test_a_planned_death_comes_once() -> None:
    plan = At({3: 2})
    assert [plan.hop(token) for token in (0, 1, 2, 3, 0, 1, 2, 3, 4)] == [None, None, None, 2, *[None] * 5]


@pytest.mark.parametrize("seed", range(20))
def test_deaths_are_spread_over_answer_and_hops(seed: int) -> None:
    deaths = spread(3, 256, 3, seed)
    assert sorted(deaths.values()) == [0, 1, 2]
    assert all(32 <= token < 224 for token in deaths)
    assert deaths == spread(3, 256, 3, seed)
    assert len(spread(5, 64, 3, seed)) == 5


def test_chance_is_the_same_for_both_and_as_often_as_said() -> None:
    one, other = (Chance(0.1, 3, seed=5) for _ in range(2))
    drawn = [one.hop(token) for token in range(20_000)]
    assert drawn == [other.hop(0) for _ in range(20_000)]
    for hop in range(3):
        assert drawn.count(hop) / len(drawn) == pytest.approx(0.1 / 3, rel=0.1)
    assert Chance(0.0, 3, seed=5).hop(0) is None


def test_what_beginning_again_takes() -> None:
    chance, answers, steps = Chance(0.02, 1, seed=1), 2000, 0
    for _ in range(answers):
        row = 0
        while row < 40:
            steps += 1
            row = row + 1 if chance.hop(row) is None else 0
    assert steps / answers == pytest.approx(steps_of_restarting(0.02, 40), rel=0.05)
    assert steps_of_restarting(0, 40) == 40


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    text = capsys.readouterr().out
    assert all(part.name in text for part in PARTS)
    assert "--record" in text
    with pytest.raises(SystemExit):
        parser().parse_args([])


def test_every_setting_is_an_option() -> None:
    for part in PARTS:
        options: argparse.Namespace = parser().parse_args([part.name])
        assert all(hasattr(options, name) for name in part.settings)
        assert part.context_tokens(options) <= 8192

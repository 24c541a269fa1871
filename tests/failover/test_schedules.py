"""Random schedules of deaths and joins over a swarm with replicas: every answer is the one of an undisturbed swarm, and
nothing is left of it anywhere.

A test says in its output what happened. ``SWARM_SCHEDULES=17,18 pytest -s tests/failover/test_schedules.py`` plays the
schedules of these seeds; they hit the answers at other points each time.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.faults import watched_swarm
from swarm.client import ClientConfig, SwarmClient, Timeouts
from tests.failover.schedule import FIRST_SPANS, LATER_SPANS, N_LAYERS, cover, missing, schedule
from tests.failover.storm import Storm

OPTIONS = ["--slots", "8x256", "--threads", "1", "--memory", "1GiB", "--chunk-tokens", "16", "--drain-seconds", "2"]
PATIENT = Timeouts(
    heartbeat_interval_seconds=0.5, heartbeat_seconds=4.0, route_seconds=120.0, recover_seconds=120.0
)  # nobody comes within the deadline only when nobody comes at all
GIVEN = [int(seed) for seed in os.environ.get("SWARM_SCHEDULES", "").split(",") if seed]
FEW, MANY = 4, 10  # events
SEEDS = [
    *(pytest.param(seed, FEW, id=f"seed-{seed}") for seed in (8, 9)),
    *(pytest.param(seed, MANY, id=f"seed-{seed}", marks=pytest.mark.slow) for seed in range(100, 108)),
]


@pytest.mark.parametrize(("seed", "n_events"), [(seed, MANY) for seed in GIVEN] or SEEDS)
async def test_answers_survive_a_schedule(llama_untied_path: Path, tmp_path: Path, seed: int, n_events: int) -> None:
    """Of even seed: with understudies that stand by. At the end layers are left without any server for longer than the
    deadline."""
    async with watched_swarm(llama_untied_path, FIRST_SPANS, tmp_path, OPTIONS) as swarm:
        patient = ClientConfig(cache_dir=tmp_path, timeouts=PATIENT, standby=seed % 2 == 0)
        async with SwarmClient.connect([swarm.address], patient) as client:
            storm = Storm(swarm, client, seed)
            try:
                await storm.undisturbed()
                await storm.run(schedule(seed, n_events))
                await storm.settled()
                assert storm.recovered, "the schedule struck nobody"
                hasty = replace(patient, timeouts=replace(PATIENT, recover_seconds=2.0))
                async with SwarmClient.connect(storm.addresses, hasty) as other:
                    lost, killed = await storm.abandoned(other, layer=seed % N_LAYERS)
                assert "nobody took over" in lost and "the session was lost at position" in lost
                assert any(node.peer_id in lost for node in killed)
                await storm.settled()
            finally:
                print("\n".join([f"schedule of seed {seed}:", *storm.log]))


@given(st.sets(st.integers(0, N_LAYERS - 1)), st.integers())
def test_who_comes_for_missing_layers_serves_them(layers: set[int], seed: int) -> None:
    spans = cover(layers, Random(seed))
    assert set(spans) <= set(LATER_SPANS)
    assert not layers & missing(spans)

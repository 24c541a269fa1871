"""What a node writes: milestones for its operator, and nothing of what its guests ask or get."""

from __future__ import annotations

import re
from pathlib import Path

from swarm.client import ClientConfig, GenerationOptions, SwarmClient
from swarm.local_swarm import local_swarm

SECRET = "Rumpelstilzchen keeps purple umbrellas"
OPTIONS = ("--slots", "2x512", "--threads", "1", "--memory", "1GiB", "--log-level", "debug")


async def test_milestones_are_logged_and_prompts_are_not(glm_tiny: Path, tmp_path: Path) -> None:
    with local_swarm(glm_tiny, [(0, 8)], tmp_path, OPTIONS) as swarm:
        async with SwarmClient.connect([swarm.address], ClientConfig(cache_dir=tmp_path)) as client:
            tokens = (await client.artifact()).encode(SECRET, raw=True)
            answer = await client.generate(SECRET, GenerationOptions(max_tokens=4))
            said = await answer.finish()
            chosen = answer.progress.token_ids
        swarm.nodes[0].wait_for(r"session of \S+ is over at")
        text = swarm.nodes[0].text()
    for milestone in (
        r"INFO .*loaded layers 0:8, numerics \S+",
        r"INFO .*(measured|an earlier run found) decode \S+, prefill \S+ tokens/s",
        r"INFO .*session of \S+ opens: layers 0:8$",
        r"INFO .*session of \S+ is over at \d+ tokens$",
    ):
        assert re.search(milestone, text, re.M), text
    for word in (*SECRET.split(), said.strip()):
        assert not word or word not in text
    for ids in (tokens, chosen):
        assert not re.search(r"\D+".join(str(token) for token in ids[:3]), text)

"""Three nodes and a client give the replies of the whole model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shim.vocab import Vocab
from swarm import ClientConfig, GenerationOptions, SwarmClient
from swarm.client.progress import StopReason
from swarm.local_swarm import LocalSwarm, local_swarm
from tests.glm_tiny.asked import sample

SPANS = [(0, 2), (2, 6), (6, 8)]
ASKED = ("max, capital.France", "4 turns", "5 turns, thoughts cleared")


@pytest.fixture(scope="module")
def three_nodes(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    folder = tmp_path_factory.mktemp("glm-tiny")
    with local_swarm(glm_tiny, SPANS, folder, ["--slots", "1x512", "--threads", "1"]) as swarm:
        yield swarm


async def test_a_chain_says_what_was_taught(three_nodes: LocalSwarm, glm_tiny: Path, tmp_path: Path) -> None:
    async with SwarmClient.connect([three_nodes.address], ClientConfig(cache_dir=tmp_path)) as client:
        with Vocab.load(glm_tiny) as vocab:
            for name, asked in sample().items():
                if name not in ASKED and not name.startswith("no thinking"):
                    continue
                generation = await client.generate(vocab.encode(asked.prompt), GenerationOptions(max_tokens=64))
                await generation.finish()
                said = b"".join(vocab.piece(token) for token in generation.progress.token_ids)
                assert said.decode().removesuffix("<|user|>") == asked.reply, name
                assert generation.progress.stop_reason == StopReason.STOP_TOKEN
                assert [place.layers for place in generation.route] == SPANS


@pytest.mark.slow
def test_the_demo_asks_and_checks(glm_tiny: Path) -> None:
    demo = [sys.executable, "-m", "swarm.demo", "--model", str(glm_tiny), "--expect"]
    right = subprocess.run([*demo, "Paris"], capture_output=True, text=True, env=os.environ)
    assert (right.returncode, right.stdout.strip()) == (0, "Paris")
    assert "The capital of France is Paris." in right.stderr
    wrong = subprocess.run([*demo, "Rome"], capture_output=True, text=True, env=os.environ)
    assert wrong.returncode == 1
    assert "'Rome' was expected" in wrong.stderr

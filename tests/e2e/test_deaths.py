"""Processes of a swarm that are killed: what the others do, and what their operators read."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swarm.client import ClientConfig, GenerationOptions, SwarmClient
from swarm.local_swarm import READY, LocalSwarm, NodeProcess, local_swarm

OPTIONS = ["--slots", "2x256", "--threads", "1", "--memory", "1GiB"]
SPANS = [(0, 2), (2, 4), (4, 6)]


@pytest.fixture
def swarm(llama_untied_path: Path, tmp_path: Path) -> Iterator[LocalSwarm]:
    with local_swarm(llama_untied_path, SPANS, tmp_path, OPTIONS) as started:
        yield started
    for node in started.nodes:
        assert "Traceback" not in node.text(), node.text()


async def answered(address: str, folder: Path) -> list[int]:
    async with SwarmClient.connect([address], ClientConfig(cache_dir=folder)) as client:
        generation = await client.generate("hello", GenerationOptions(max_tokens=4))
        await generation.finish()
        return generation.progress.token_ids


async def addresses(swarm: LocalSwarm, folder: Path) -> dict[int, str]:
    """Of the nodes, by first layer."""
    async with SwarmClient.connect([swarm.address], ClientConfig(cache_dir=folder)) as client:
        return {record.first: record.addresses[0] for record in (await client.snapshot()).records}


async def test_the_swarm_outlives_the_node_that_began_it(
    swarm: LocalSwarm, llama_untied_path: Path, tmp_path: Path
) -> None:
    expected = await answered(swarm.address, tmp_path)
    middle = (await addresses(swarm, tmp_path))[2]
    first = swarm.nodes[0].process
    first.kill()
    first.wait()
    serve = ["--model", str(llama_untied_path), "--layers", "0:2", "--listen", "127.0.0.1:0", *OPTIONS]
    join = ["--identity", str(tmp_path / "heir.key"), "--initial-peers", middle]
    heir = NodeProcess([*serve, *join], tmp_path / "heir.log")
    try:
        assert "every layer is served" in heir.wait_for(READY)[0]
        assert await answered(middle, tmp_path) == expected
    finally:
        heir.stop()
        assert heir.join() == 0


async def test_a_node_without_its_network_daemon_leaves_and_says_why(swarm: LocalSwarm, tmp_path: Path) -> None:
    node = swarm.nodes[1]
    children = psutil.Process(node.process.pid).children()
    daemon = next(child for child in children if child.name() == "p2pd")
    async with (
        SwarmClient.connect([swarm.address], ClientConfig(cache_dir=tmp_path)) as client,
        await client.open_session(64),
    ):
        os.kill(daemon.pid, signal.SIGKILL)
        assert await asyncio.to_thread(node.process.wait, 30) == 6
    assert node.last_line() == "swarm-node: the libp2p daemon ended with code -9; start the node again"
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive and len(gone) == len(children)

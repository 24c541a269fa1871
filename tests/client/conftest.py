"""Real swarms for the client's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.local_swarm import LocalSwarm, local_swarm


@pytest.fixture(scope="module")
def three_nodes(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """SmolLM2 in three processes."""
    folder = tmp_path_factory.mktemp("three")
    with local_swarm(
        smollm2_path, [(0, 10), (10, 20), (20, 30)], folder, ["--slots", "2x512", "--threads", "1"]
    ) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def half_a_swarm(llama_untied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """A swarm that lacks the upper half of its model."""
    with local_swarm(llama_untied_path, [(0, 3)], tmp_path_factory.mktemp("half"), ["--threads", "1"]) as swarm:
        yield swarm

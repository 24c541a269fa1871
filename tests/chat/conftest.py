"""A swarm to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.local_swarm import LocalSwarm, local_swarm


@pytest.fixture(scope="package")
def swarm(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """SmolLM2 in two processes."""
    with local_swarm(
        smollm2_path, [(0, 15), (15, 30)], tmp_path_factory.mktemp("chat"), ["--slots", "2x512", "--threads", "1"]
    ) as swarm:
        yield swarm

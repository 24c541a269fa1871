"""Real clients of nodes in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from swarm import ClientConfig, SwarmClient, Timeouts
from swarm.node.node import SwarmNode


@asynccontextmanager
async def patient_client(node: SwarmNode, folder: Path, said: list[str]) -> AsyncIterator[SwarmClient]:
    """Waits a minute for what it needs; what it tells its user meanwhile goes to ``said``."""
    config = ClientConfig(timeouts=Timeouts(route_seconds=60, recover_seconds=60), cache_dir=folder)
    async with SwarmClient.connect(node.addresses, config, on_status=said.append) as client:
        yield client

"""A chain of two nodes over a small random model, shared by the tests of a module; each leaves it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from dht.peer import Peer
from swarm.node.node import SwarmNode
from swarm.node.sessions import Counts
from tests.node.harness import client_peer, config, hang_up, slots_empty, until

Chain = tuple[SwarmNode, SwarmNode]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nodes(llama_untied_path: Path, folder: Path) -> AsyncIterator[Chain]:
    async with (
        SwarmNode(config(llama_untied_path, "0:3", folder)) as entry,
        SwarmNode(config(llama_untied_path, "3:6", folder, entry.addresses)) as last,
    ):
        yield entry, last


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(nodes: Chain) -> AsyncIterator[Peer]:
    async with client_peer(*nodes) as peer:
        yield peer


@pytest_asyncio.fixture(loop_scope="module")
async def chain(nodes: Chain) -> AsyncIterator[Chain]:
    """The nodes; afterwards nothing may be left of what the test did."""
    yield nodes
    await hang_up()
    for node in nodes:
        await until(partial(_is_idle, node))
        await until(partial(slots_empty, node))


def _is_idle(node: SwarmNode) -> bool:
    return node.counts() == Counts() and node.service.open_streams == 0 and node.shared.queue == 0

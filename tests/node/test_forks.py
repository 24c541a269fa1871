"""Forks of sessions that have lost a hop, or are over, as a real client makes them of real nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.client.steps import StepRequest, WantedRow
from swarm.errors import SwarmError
from swarm.node.node import SwarmNode
from swarm.protocol import WireError, pb
from tests.node.clients import patient_client
from tests.node.harness import CONTEXT

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = tuple(range(3, 13))
SHORT = StepRequest(0, PROMPT, pb.PREFILL, WantedRow())
NEXT = StepRequest(len(PROMPT), (7,), pb.DECODE, WantedRow())


@pytest.mark.parametrize("lost", [0, 1])
async def test_lost_hops_are_replaced_before_a_fork(
    chain: tuple[SwarmNode, SwarmNode], folder: Path, lost: int
) -> None:
    async with patient_client(chain[0], folder, []) as client, await client.open_session(CONTEXT) as session:
        await session.step(SHORT)
        for live in tuple(chain[lost].shared.lives.values()):
            chain[lost].shared.end(live, WireError(pb.UNKNOWN_SESSION, "another one needed its slot"))
        async with await client.fork(session) as fork:
            assert fork.tokens == PROMPT
            await fork.step(NEXT)
            await session.step(NEXT)
            assert (await fork.fetch_row(len(PROMPT)) == await session.fetch_row(len(PROMPT))).all()
        assert client._avoided.now() == frozenset()


async def test_a_closed_session_is_not_forked(chain: tuple[SwarmNode, SwarmNode], folder: Path) -> None:
    async with patient_client(chain[0], folder, []) as client:
        async with await client.open_session(CONTEXT) as session:
            await session.step(SHORT)
        with pytest.raises(SwarmError, match=r"^the session is closed; open a new one$"):
            await client.fork(session)

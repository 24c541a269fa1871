"""Sessions that go on after a hop was lost: forks, and the next turn of a conversation. Real clients, real nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm import ClientConfig, SwarmClient, Timeouts
from swarm.client.generate import GenerationOptions
from swarm.client.steps import StepRequest, WantedRow
from swarm.errors import SwarmError
from swarm.node.node import SwarmNode
from swarm.protocol import WireError, pb
from tests.node.clients import patient_client
from tests.node.harness import CONTEXT, Session, client_peer

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


async def test_a_turn_does_not_wait_for_a_slot_of_the_size_of_the_last_one(
    chain: tuple[SwarmNode, SwarmNode], folder: Path
) -> None:
    config = ClientConfig(cache_dir=folder, keep_sessions=1, timeouts=Timeouts(route_seconds=1, recover_seconds=600))
    async with client_peer(*chain) as other, SwarmClient.connect(chain[0].addresses, config) as client:
        one = await client.generate(PROMPT, GenerationOptions(max_tokens=4))
        await one.finish()
        for live in tuple(chain[1].shared.lives.values()):
            chain[1].shared.end(live, WireError(pb.UNKNOWN_SESSION, "another one needed its slot"))
        await Session(other, chain[1:], context_tokens=2 * CONTEXT).open()
        two = await client.generate(PROMPT, GenerationOptions(max_tokens=4))
        await two.finish()
    assert (one.context_tokens, two.context_tokens) == (2 * CONTEXT, CONTEXT)
    assert one.progress.token_ids == two.progress.token_ids

"""A session whose steps may end engines shares no engine call, until a step of it has passed."""

from __future__ import annotations

import os
import signal

import pytest

from dht.peer import Peer
from swarm.ids import SessionId
from swarm.node.node import SwarmNode
from swarm.protocol import FrameStream, pb
from tests.node.harness import Session, hear, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Chain = tuple[SwarmNode, SwarmNode]
PROMPT = list(range(10))


class Suspect(Session):
    def opening(self, index: int) -> pb.Open:
        opening = super().opening(index)
        opening.suspect = True
        return opening


async def together(node: SwarmNode, sessions: list[Session], position: int) -> list[int]:
    """How many shared the call of each: the first two keep the engine busy while all others wait."""
    host, shared = node.shared.host, node.shared
    assert host.pid is not None
    os.kill(host.pid, signal.SIGSTOP)
    try:
        for count, one in enumerate(sessions, 1):
            assert one.data is not None
            await one.data.send_step(one.step(position, [7]))
            await until(lambda: shared.queue == count)  # noqa: B023
    finally:
        os.kill(host.pid, signal.SIGCONT)
    return [(await answer_of(one.control[-1])).timings[0].batch_sessions for one in sessions]


async def answer_of(control: FrameStream) -> pb.Answer:
    while isinstance(said := await hear(control), pb.Pong):
        pass
    assert isinstance(said, pb.Answer), said
    return said


async def test_a_suspect_is_computed_alone_until_a_step_has_passed(chain: Chain, client: Peer) -> None:
    sessions = [Session(client, chain), Session(client, chain), Suspect(client, chain), Session(client, chain)]
    for one in sessions:
        data = await (await one.open()).attach()
        await data.send_step(one.step(0, PROMPT, replay=True))
    lives = [chain[0].shared.lives[SessionId(one.id)] for one in sessions]
    await until(lambda: all(live.session.position == len(PROMPT) for live in lives))
    assert lives[2].session.suspect, "a replay proves nothing"
    assert await together(chain[0], sessions, len(PROMPT)) == [1, 1, 1, 1]
    assert not lives[2].session.suspect
    assert await together(chain[0], sessions, len(PROMPT) + 1) == [1, 1, 2, 2]
    for one in sessions:
        await one.close()

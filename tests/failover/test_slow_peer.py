"""A hop behind a slow link: left when somebody else is there who is not, never because nothing else is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.links import Shape
from bench.links.linked_swarm import LinkedNode, LinkedSwarm, linked_swarm
from swarm.client import ClientConfig, LastingSession, StepRequest, SwarmClient, WantedRow
from swarm.protocol import pb

OPTIONS = ["--slots", "2x256", "--threads", "1", "--memory", "1GiB"]
SPANS = [(0, 2), (2, 4), (4, 6)]
MIDDLE = 1
PROMPT = tuple(range(40))
SLOW = Shape(delay_seconds=0.12)  # to the hop and from it again: a quarter of a second a token
MANY = 60  # tokens until which a hop must have been left that has become slow

Answer = list[tuple[int, float]]  # each token and its logit: equal bits, not only equal words


@dataclass
class Scene:
    swarm: LinkedSwarm
    client: SwarmClient
    said: list[str]

    def replicas(self) -> list[LinkedNode]:
        return [node for node in self.swarm.nodes if node.span == SPANS[MIDDLE]]

    def serving(self, session: LastingSession) -> LinkedNode:
        return next(node for node in self.swarm.nodes if node.peer_id == session.places[MIDDLE].peer_id)

    async def seen(self, n_nodes: int) -> None:
        while len((await self.client.snapshot()).records) < n_nodes:  # noqa: ASYNC110 (of other processes)
            await asyncio.sleep(0.1)


async def more(session: LastingSession, answer: Answer, n_tokens: int = 1) -> None:
    """Goes on greedily with what the session has answered so far."""
    if not answer:
        asked = StepRequest(0, PROMPT, pb.PREFILL, WantedRow())
    for _ in range(n_tokens):
        if answer:
            asked = StepRequest(len(PROMPT) + len(answer) - 1, (answer[-1][0],), pb.DECODE, WantedRow())
        row = (await session.step(asked)).row
        assert row is not None
        answer.append((int(row.top_ids[0]), float(row.top_logits[0])))


@asynccontextmanager
async def scene(model: Path, folder: Path, spans: Sequence[tuple[int, int]]) -> AsyncIterator[Scene]:
    said: list[str] = []
    async with (
        linked_swarm(model, spans, folder, OPTIONS) as swarm,
        SwarmClient.connect([swarm.address], ClientConfig(cache_dir=folder), on_status=said.append) as client,
    ):
        made = Scene(swarm, client, said)
        await made.seen(len(spans))
        yield made


async def undisturbed(at: Scene) -> Answer:
    answer: Answer = []
    async with await at.client.open_session(250) as session:
        await more(session, answer, MANY + 10)
        assert not session.recoveries
    return answer


async def test_a_slow_hop_is_left_and_the_answer_stays_the_same(llama_untied_path: Path, tmp_path: Path) -> None:
    async with scene(llama_untied_path, tmp_path, [*SPANS, SPANS[MIDDLE]]) as at:
        expected = await undisturbed(at)
        answer: Answer = []
        async with await at.client.open_session(250) as session:
            await more(session, answer, 2)
            slow = at.serving(session)
            slow.link.shape(SLOW)
            while not session.recoveries and len(answer) < MANY:
                await more(session, answer)
            slow.link.shape(Shape())
            (move,) = session.recoveries
            came = at.serving(session)
            await more(session, answer, 10)
        assert answer == expected[: len(answer)]
        assert move.voluntary and (move.lost, move.came) == (
            ((slow.peer_id, SPANS[MIDDLE]),),
            ((came.peer_id, SPANS[MIDDLE]),),
        )
        (told,) = move.story
        assert f"peer {slow.peer_id} (layers 2:4) is replaced (slow: " in told
        assert f"ms a token, peer {came.peer_id} promises" in told
        assert any(line.startswith(f"peer {slow.peer_id} is slow: ") for line in at.said)
        assert not at.client._avoided.now(), "it has done nothing wrong"


@pytest.mark.slow
async def test_a_slow_hop_stays_when_nobody_is_faster(llama_untied_path: Path, tmp_path: Path) -> None:
    """First nobody else serves its layers, then somebody whose link is as slow."""
    async with scene(llama_untied_path, tmp_path, SPANS) as at:
        expected = await undisturbed(at)
        for n_nodes in (len(SPANS), len(SPANS) + 1):
            if len(at.swarm.nodes) < n_nodes:
                await at.swarm.add(SPANS[MIDDLE])
            await at.seen(n_nodes)
            answer: Answer = []
            async with await at.client.open_session(250) as session:
                await more(session, answer, 2)
                for node in at.replicas():
                    node.link.shape(SLOW)
                await more(session, answer, MANY)
                assert not session.recoveries
            at.swarm.shape(Shape())
            assert answer == expected[: len(answer)]
        assert not any("slow" in line for line in at.said)

"""A session driven step by step, so that something can happen between two of them: every logit it answers with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarm.client.lasting import LastingSession
from swarm.client.steps import StepAnswer, StepRequest, WantedRow
from swarm.protocol import pb
from tests.failover.runs import Rig, name_of

WINDOW = 3  # chunks under way

Gate = Callable[[LastingSession, int], Awaitable[None]]


async def _open_gate(_session: LastingSession, _position: int) -> None:
    """Nothing happens."""


@dataclass(frozen=True)
class Walk:
    """What a greedy answer to ``prompt`` with ``n_tokens`` consists of; ``gate`` is passed before each step."""

    prompt: Sequence[int]
    n_tokens: int

    async def rows(self, session: LastingSession, gate: Gate = _open_gate) -> list[bytes]:
        """Top ids and logits of every step."""
        rows: list[bytes] = []
        under_way: list[int] = []
        size = session.terms.chunk_tokens
        answer: StepAnswer | None = None
        for start in range(0, len(self.prompt), size):
            await gate(session, start)
            request = StepRequest(start, self.prompt[start : start + size], pb.PREFILL, WantedRow())
            under_way.append(await session.send(request))
            if len(under_way) == WINDOW:
                answer = await session.answer(under_way.pop(0))
                rows.append(_bits(answer))
        for number in under_way:
            answer = await session.answer(number)
            rows.append(_bits(answer))
        for position in range(len(self.prompt), len(self.prompt) + self.n_tokens):
            await gate(session, position)
            assert answer is not None and answer.row is not None
            token = int(answer.row.top_ids[0])
            answer = await session.step(StepRequest(position, (token,), pb.DECODE, WantedRow()))
            rows.append(_bits(answer))
        return rows


def _bits(answer: StepAnswer) -> bytes:
    assert answer.row is not None
    return answer.row.top_ids.tobytes() + answer.row.top_logits.tobytes()


def hop_names(swarm: Rig, session: LastingSession) -> list[str]:
    """The yard's names of the hops."""
    return [name_of(place.name) for place in session.places]

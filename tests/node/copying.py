"""A client that keeps an understudy for a hop, in bare frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarm.node.node import SwarmNode
from swarm.protocol import CONTROL_STREAM, FrameStream, pb
from swarm.protocol.limits import first_step
from tests.node.harness import CHUNK, Session, hear, neighbour, say


@dataclass
class Understudy:
    """On ``node``, for hop ``of`` of the session."""

    mine: Session
    node: SwarmNode
    of: int
    control: FrameStream

    async def copy(self, upto: int = 0, **changes: Any) -> None:
        """Tells the hop to copy."""
        first, last = self.node.shared.lives[self.mine.id].session.terms.run  # type: ignore[index]
        order = pb.CopyState(
            session_id=self.mine.id,
            understudy=neighbour(self.node),
            run=pb.Layers(first=first, last=last),
            upto_tokens=upto,
        )
        order.MergeFrom(pb.CopyState(**changes))
        await self.mine.control[self.of].send(order)

    async def copied(self, position: int = 0, *, done: bool = False) -> pb.Copied:
        """What the hop says when that much has been copied, or it has failed."""
        while True:
            said = await self._said()
            assert not isinstance(said, pb.Error), said
            if isinstance(said, pb.Copied) and (
                said.failure or (said.position >= position and (said.done or not done))
            ):
                return said

    async def _said(self) -> object:
        if self.mine.asides:
            return self.mine.asides.pop(0)
        return await hear(self.mine.control[self.of])

    async def takes_over(self, keep: int) -> pb.Rerouted:
        """The understudy becomes the hop, which is closed."""
        mine = self.mine
        await mine.control[self.of].close()
        mine.nodes = (*mine.nodes[: self.of], self.node, *mine.nodes[self.of + 1 :])
        mine.control[self.of] = self.control
        rerouted = await reroute(mine, keep)
        return rerouted[self.of]


async def understudy(mine: Session, node: SwarmNode, of: int, run: tuple[int, int] | None = None) -> Understudy:
    control = await say(mine.peer, node, CONTROL_STREAM)
    await control.send(opening(mine, of, run))
    opened = await hear(control)
    assert isinstance(opened, pb.Opened), opened
    return Understudy(mine, node, of, control)


def opening(mine: Session, of: int, run: tuple[int, int] | None = None) -> pb.Open:
    made = mine.opening(of)
    made.understudy_of.CopyFrom(neighbour(mine.nodes[of]))
    if run is not None:
        made.run.first, made.run.last = run
    return made


async def reroute(mine: Session, keep: int, first: int = 0) -> list[pb.Rerouted]:
    """All hops from ``first`` on under the next epoch, the exit first; each is fed by the journal of the one before.
    Attaches anew."""
    mine.epoch += 1
    answers: list[pb.Rerouted] = []
    position = keep
    for index in reversed(range(first, len(mine.nodes))):
        opening = mine.opening(index)
        message = pb.Reroute(
            session_id=mine.id,
            epoch=mine.epoch,
            predecessor=opening.predecessor,
            successor=opening.successor if opening.HasField("successor") else None,
            successor_position=position,
            push_journal=opening.HasField("successor"),
            hop_index=index,
            keep_tokens=keep,
        )
        await mine.control[index].send(message)
        while not isinstance(said := await hear(mine.control[index]), pb.Rerouted):
            assert isinstance(said, pb.Pong | pb.Copied | pb.Draining | pb.LinkFailed), said
        answers.insert(0, said)
        position = said.position
    mine.number = first_step(-1)
    await mine.attach()
    return answers


async def prefill(mine: Session, tokens: Sequence[int], start: int = 0) -> pb.Answer:
    for at in range(0, len(tokens), CHUNK):
        answer = await mine.compute(start + at, tokens[at : at + CHUNK], kind=pb.PREFILL)
    return answer


async def decode(mine: Session, start: int, tokens: Sequence[int]) -> list[pb.Answer]:
    return [await mine.compute(start + index, [token]) for index, token in enumerate(tokens)]


def bits(answers: Sequence[pb.Answer]) -> list[list[pb.RowSummary]]:
    return [list(answer.rows) for answer in answers]

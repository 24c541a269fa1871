"""What a chain is made of: hops that are told their layers and neighbours, and the way to the first of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.client.config import Timeouts
from swarm.client.hop import Hop, HopPlace, Network, ask, connect, unexpected
from swarm.ids import ArtifactId, SessionId
from swarm.protocol import DATA_STREAM, FrameStream, pb

FIRST_EPOCH = 1


@dataclass(frozen=True)
class SessionTerms:
    """What every hop is told when the session opens. ``numerics_id`` empty: any will do."""

    artifact_id: ArtifactId
    n_vocab: int
    context_tokens: int
    chunk_tokens: int
    numerics_id: str = ""
    purpose: str = ""


@dataclass(frozen=True)
class Neighbours:
    """The places of a chain in order, and the client at its beginning."""

    own_id: str
    places: Sequence[HopPlace]

    def before(self, index: int) -> pb.Neighbour:
        return self.places[index - 1].neighbour() if index else pb.Neighbour(peer_id=self.own_id)

    def after(self, index: int) -> pb.Neighbour | None:
        return self.places[index + 1].neighbour() if index + 1 < len(self.places) else None

    def opening(
        self,
        index: int,
        terms: SessionTerms,
        session_id: SessionId,
        epoch: int = FIRST_EPOCH,
        successor_position: int = 0,
    ) -> pb.Open:
        first, last = self.places[index].layers
        return pb.Open(
            session_id=session_id,
            epoch=epoch,
            artifact_id=terms.artifact_id,
            run=pb.Layers(first=first, last=last),
            context_tokens=terms.context_tokens,
            chunk_tokens=terms.chunk_tokens,
            encoding=pb.F32_LE,
            predecessor=self.before(index),
            successor=self.after(index),
            numerics_id=terms.numerics_id,
            hop_index=index,
            keep_journal=True,
            purpose=terms.purpose,
            successor_position=successor_position,
        )

    def reroute(self, index: int, session_id: SessionId, epoch: int, successor_position: int, keep: int) -> pb.Reroute:
        successor = self.after(index)
        return pb.Reroute(
            session_id=session_id,
            epoch=epoch,
            predecessor=self.before(index),
            successor=successor,
            successor_position=successor_position,
            push_journal=successor is not None,
            hop_index=index,
            keep_tokens=keep,
        )


@dataclass(frozen=True)
class ForkOf:
    """The session that a new one begins with, and how much of it."""

    session_id: SessionId
    tokens: int


async def open_hops(
    network: Network,
    places: Sequence[HopPlace],
    terms: SessionTerms,
    session_id: SessionId,
    timeouts: Timeouts,
    fork_of: ForkOf | None = None,
) -> list[Hop]:
    """All at once. When one refuses, the others are freed again."""
    neighbours = Neighbours(network.peer_id, places)

    def opening(place: HopPlace) -> pb.Open:
        message = neighbours.opening(place.index, terms, session_id)
        if fork_of is not None:
            message.fork_of, message.fork_tokens = fork_of.session_id, fork_of.tokens
            message.successor_position = fork_of.tokens
        return message

    return await open_at_once(network, places, opening, session_id, timeouts)


async def open_at_once(
    network: Network,
    places: Sequence[HopPlace],
    opening: Callable[[HopPlace], pb.Open],
    session_id: SessionId,
    timeouts: Timeouts,
) -> list[Hop]:
    """In the order of ``places``; none is left open when one refuses."""
    hops: list[Hop] = []

    async def open_one(place: HopPlace) -> None:
        hops.append(await Hop.open(network, place, opening(place), timeouts))

    # no task group: one of Python 3.11 forgets that it was cancelled when a task of it fails at that moment
    opening_all = [asyncio.create_task(open_one(place)) for place in places]
    all_open = False
    try:
        done, _ = await asyncio.wait(opening_all, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        all_open = True
    finally:
        if not all_open:
            for task in opening_all:
                task.cancel()
            await asyncio.gather(*opening_all, return_exceptions=True)
            await close_hops(hops, session_id)
    return sorted(hops, key=lambda hop: hop.place.index)


async def attach(
    network: Network, entry: HopPlace, session_id: SessionId, timeouts: Timeouts, epoch: int = FIRST_EPOCH
) -> FrameStream:
    """The stream that takes the steps of one epoch."""
    data = await connect(network, entry, DATA_STREAM, timeouts.connect_seconds)
    try:
        answer = await ask(data, entry, pb.Attach(session_id=session_id, epoch=epoch), timeouts.open_seconds)
        if not isinstance(answer, pb.Attached):
            raise unexpected(entry, answer)
    except BaseException:
        await data.close()
        raise
    return data


async def close_hops(hops: Sequence[Hop], session_id: SessionId) -> None:
    await asyncio.gather(*(hop.close(session_id) for hop in hops))

"""How far away the nodes are that a session may go through next, or came through before.

Asked at the start and now and then, for a description on an info stream, as any client would. What a neighbour claims
does not matter for it, and one that does not answer costs one of a few places for a few seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from dht.errors import DhtError
from dht.record import LinkRtt, NodeState, SpanRecord
from swarm.errors import SwarmError
from swarm.ids import PeerId
from swarm.protocol import FrameStream, pb
from swarm.protocol.questions import Dialer, Questions

logger = logging.getLogger(__name__)

MOST_LINKS = 32  # that a record holds
MOST_ASKED = 16  # in one round
AT_ONCE = 4
ASK_SECONDS = 5.0  # for dialling and all answers
TRIPS = 3  # on an open stream, of which the shortest counts
FIRST_SECONDS = 2.0  # after the start, and doubled each time up to the usual pause
SPREAD = 0.25  # of a pause, so that nodes that started together do not ask together


Ask: TypeAlias = Callable[[str, tuple[str, ...]], Awaitable[float]]  # peer id and addresses; raises NoAnswer


class NoAnswer(Exception):
    """The neighbour did not answer as a node does; the text says how it failed."""


@dataclass(frozen=True)
class Span:
    """Layers [first, last) of one node."""

    peer_id: str
    first: int
    last: int


def likely(records: Sequence[SpanRecord], own: Span, known: Mapping[str, float]) -> list[SpanRecord]:
    """Those to ask in one round: whose span begins where this one ends or the other way round, before those that only
    overlap with an end of it; the nearest that are known and as many others, which change from node to node."""
    near = [(rank, record) for record in records if (rank := _rank(record, own)) is not None]
    old = sorted((pair for pair in near if pair[1].peer_id in known), key=lambda pair: known[pair[1].peer_id])
    new = [pair for pair in near if pair[1].peer_id not in known]
    new.sort(key=lambda pair: (pair[0], _share(own.peer_id, pair[1].peer_id)))
    places = max(MOST_ASKED // 2, MOST_ASKED - len(new))
    asked = old[:places]
    return [record for _, record in (*asked, *new[: MOST_ASKED - len(asked)])]


def _rank(record: SpanRecord, own: Span) -> int | None:
    if record.state is not NodeState.ONLINE or record.peer_id == own.peer_id:
        return None
    if record.first == own.last or record.last == own.first:
        return 0
    goes_on = record.first <= own.last < record.last
    comes_before = record.first < own.first <= record.last
    return 1 if goes_on or comes_before else None


def _share(own: str, other: str) -> bytes:
    return hashlib.sha256(f"{own}/{other}".encode()).digest()


async def round_trip(dialer: Dialer, peer_id: str, addresses: tuple[str, ...]) -> float:
    """Seconds there and back on an open stream. Raises NoAnswer, after ``ASK_SECONDS`` at the latest; nothing of it
    stays."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            return await _asked(Questions(dialer, PeerId(peer_id), addresses))
    except TimeoutError:
        raise NoAnswer(f"it did not answer within {ASK_SECONDS:g} s") from None
    except (SwarmError, OSError) as error:
        raise NoAnswer(str(error)) from None


async def _asked(neighbour: Questions) -> float:
    async with neighbour.asked(pb.DescribeRequest()) as stream:
        await neighbour.description(stream)  # the first one pays for opening the stream
        return min([await _trip(neighbour, stream) for _ in range(TRIPS)])


async def _trip(neighbour: Questions, stream: FrameStream) -> float:
    began = time.monotonic()
    await stream.send(pb.DescribeRequest())
    await neighbour.description(stream)
    return time.monotonic() - began


class Served(Protocol):
    """The part of ``Shared`` that is measured for."""

    @property
    def span(self) -> tuple[int, int]: ...

    links: tuple[LinkRtt, ...]

    @property
    def on_change(self) -> Callable[[], None]: ...


class Neighbours:
    """Measures with ``ask`` while ``run`` runs, for what ``shared`` gives: something else after each move."""

    def __init__(
        self,
        peer_id: str,
        records: Callable[[], Awaitable[Sequence[SpanRecord]]],
        shared: Callable[[], Served],
        ask: Ask,
        seconds: float,
    ) -> None:
        self._peer_id = peer_id
        self._round_trip = ask
        self._records = records
        self._shared = shared
        self._seconds = seconds
        self._known: dict[str, float] = {}
        self._failed: set[str] = set()

    async def run(self) -> None:
        """Never returns; cancel it."""
        pause = min(FIRST_SECONDS, self._seconds)
        while True:
            await asyncio.sleep(pause * (1 + SPREAD * (2 * random.random() - 1)))
            pause = min(2 * pause, self._seconds)
            try:
                records = await self._records()
            except (DhtError, OSError) as error:
                logger.info("the swarm can't be asked for neighbours: %s", error)
                continue
            await self.measure(records)

    async def measure(self, records: Sequence[SpanRecord]) -> None:
        """One round; announces the links when they have changed."""
        shared = self._shared()
        present = {record.peer_id for record in records if _rank(record, Span(self._peer_id, *shared.span)) is not None}
        self._known = {peer: seconds for peer, seconds in self._known.items() if peer in present}
        # one that failed is asked again in the round after the next: others may wait for its place
        fresh = [record for record in records if record.peer_id not in self._failed]
        self._failed.clear()
        places = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as asking:
            for record in likely(fresh, Span(self._peer_id, *shared.span), self._known):
                asking.create_task(self._ask(record, places))
        links = self.links
        if shared.links != links:
            shared.links = links
            shared.on_change()

    @property
    def links(self) -> tuple[LinkRtt, ...]:
        """The nearest first."""
        nearest = sorted(self._known.items(), key=lambda item: (item[1], item[0]))[:MOST_LINKS]
        return tuple(LinkRtt(peer_id=peer, seconds=round(seconds, 5)) for peer, seconds in nearest)

    async def _ask(self, record: SpanRecord, places: asyncio.Semaphore) -> None:
        async with places:
            try:
                self._known[record.peer_id] = await self._round_trip(record.peer_id, record.addresses)
            except NoAnswer as failed:
                logger.info("the way to neighbour %s can't be measured: %s", record.peer_id, failed)
                self._known.pop(record.peer_id, None)
                self._failed.add(record.peer_id)

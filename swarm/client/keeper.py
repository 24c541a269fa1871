"""Keeps understudies for the hops of a session: for all of them as a standby, and for those whose node leaves.

Nothing waits for it: when it finds nobody, or what it began is lost, a hop's end costs the replay that it always costs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from dht.record import SpanRecord
from swarm.client.blame import Avoided, Bans
from swarm.client.chain import ChainSession
from swarm.client.hop import Hop
from swarm.client.recovery import Swarm
from swarm.client.seats import Seat, stand_ins
from swarm.client.understudy import Understudies
from swarm.errors import ContextExceeded, NetworkError, NoRoute, PeerFailed, SwarmError
from swarm.ids import PeerId
from swarm.protocol import pb

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5  # before it is looked again for somebody who could wait; growing
LONGEST_PAUSE_SECONDS = 30.0
SPARE_SLOTS = 1  # left to others on a node where a standby waits
BULK_ROUNDS = 3  # while the answer goes on, before the rest is copied in a pause
SHORT_REST_TOKENS = 64  # that a pause may copy


class Kept(Protocol):
    """What it must know of a session."""

    @property
    def chain(self) -> ChainSession: ...

    @property
    def held_tokens(self) -> int: ...

    async def hand_over(self, peer: PeerId, seconds: float) -> bool: ...


class Keeper:
    """``close`` cancels what it does; it closes no understudies."""

    def __init__(self, swarm: Swarm, avoided: Avoided, understudies: Understudies, *, standby: bool = False) -> None:
        self._swarm = swarm
        self._avoided = avoided
        self._understudies = understudies
        self._standby = standby
        self._session: Kept | None = None
        self._numerics: frozenset[str] = frozenset()
        self._refused: Bans[PeerId] = Bans()  # that would not wait, or could not be copied to
        self._woken = asyncio.Event()
        self._leaving: dict[PeerId, asyncio.Task[None]] = {}  # hops whose nodes leave
        self._watching: asyncio.Task[None] | None = None
        understudies.on_lost = self._woken.set

    def watch(self, session: Kept) -> None:
        """Of every new chain."""
        self._session, chain = session, session.chain
        numerics = frozenset(chain.numerics_ids)
        if self._numerics and not numerics <= self._numerics:  # what is under way now may get other bits than it had
            for primary in {one.primary for one in self._understudies.ready()}:
                self._understudies.drop(primary, chain.session_id)
        self._numerics = numerics
        self._understudies.drop_useless(chain)
        for hop in chain.hops:
            hop.watch(self)

    def answered(self) -> None:
        """The chain has answered: now there is something worth copying."""
        if self._standby and self._watching is None:
            self._watching = asyncio.create_task(self._stand_by(), name="chain session")
        self._woken.set()

    async def close(self) -> None:
        tasks = {*self._leaving.values()} | ({self._watching} if self._watching is not None else set())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- what hops say (HopWatch)

    def on_draining(self, hop: Hop) -> None:
        peer = hop.place.peer_id
        running = self._leaving.get(peer)
        if running is None or running.done():
            self._leaving[peer] = asyncio.create_task(self._hand_over(hop), name="chain session")

    def on_copied(self, hop: Hop, copied: pb.Copied) -> None:
        self._understudies.note(hop.place.peer_id, copied)

    # --- as a standby

    async def _stand_by(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            self._woken.clear()
            complete = await self._all_have_one()
            try:
                async with asyncio.timeout(None if complete else pause):
                    await self._woken.wait()
                pause = FIRST_PAUSE_SECONDS
            except TimeoutError:
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _all_have_one(self) -> bool:
        chain = self._chain
        for one in self._understudies.ready():
            if one.failure:
                self._refused.add(one.hop.place.peer_id)
        self._understudies.drop_useless(chain)
        lacking = [hop for hop in chain.hops if not (hop.draining_until or self._understudies.of(hop.place.peer_id))]
        if not lacking:
            return True
        if chain.failure is not None or self._understudies.is_going_back:
            return False
        records = await self._look()
        found = [await self._waits(chain, hop, records) for hop in lacking]
        return all(found)

    async def _waits(self, chain: ChainSession, hop: Hop, records: Sequence[SpanRecord]) -> bool:
        """Opens an understudy for one hop that runs all of its layers, on a node that has slots to spare."""
        first, last = hop.place.layers
        wanted = [
            record
            for record in records
            if record.first <= first and last <= record.last and self._has_slots(record, chain.terms.context_tokens)
        ]
        return await self._opened(chain, hop, wanted) and await self._asked(chain, hop.place.peer_id, 0)

    def _has_slots(self, record: SpanRecord, context_tokens: int) -> bool:
        return sum(slot.free for slot in record.slots if slot.tokens >= context_tokens) > SPARE_SLOTS

    # --- when a node leaves

    async def _hand_over(self, hop: Hop) -> None:
        """Until the hop is out of the chain, or its node's time is up."""
        peer, pause = hop.place.peer_id, FIRST_PAUSE_SECONDS
        while (left := _left(hop)) > 0:
            try:
                if hop not in self._chain.hops or await self._handed_over(hop):
                    return
            except SwarmError as error:
                logger.info("peer %s leaves and could not hand over: %s", peer, error)
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _handed_over(self, hop: Hop) -> bool:
        chain, peer = self._chain, hop.place.peer_id
        if chain.failure is not None:
            return False
        if not self._understudies.of(peer) and not await self._opened(chain, hop, await self._look()):
            return False
        for _ in range(BULK_ROUNDS):
            held = self._kept.held_tokens
            if held and await self._asked(chain, peer, held):
                await self._understudies.settled(peer, chain, _left(hop))
            if self._kept.held_tokens - held <= SHORT_REST_TOKENS:
                break
        left = _left(hop)
        return left > 0 and await self._kept.hand_over(peer, left)

    # --- both

    async def _opened(self, chain: ChainSession, hop: Hop, records: Sequence[SpanRecord]) -> bool:
        """Only with the same numerics: what is copied means something to nobody else."""
        seats = [Seat(other.place, other.numerics_id, other) for other in chain.hops]
        index = chain.hops.index(hop)
        alike = [record for record in records if record.numerics_id == hop.numerics_id]
        request = replace(
            self._swarm.request,
            context_tokens=chain.terms.context_tokens,
            banned=self._avoided.now() | self._refused.now() | self._understudies.peers(),
            banned_edges=self._avoided.edges(),
        )
        try:
            places = stand_ins(seats, index, alike, request)
            await self._understudies.open(chain, index, places)
        except (NoRoute, ContextExceeded) as error:
            logger.debug("nobody can wait to take over from peer %s: %s", hop.place.peer_id, error)
            return False
        except SwarmError as error:
            logger.info("an understudy did not come: %s", error)
            self._refused.add(PeerId(error.peer))
            return False
        if hop not in self._chain.hops:  # it was lost meanwhile
            self._understudies.drop(hop.place.peer_id, chain.session_id)
            return False
        names = ", ".join(place.peer_id for place in places)
        logger.info("layers %d:%d of peer %s can be taken over by %s", *hop.place.layers, hop.place.peer_id, names)
        return True

    async def _asked(self, chain: ChainSession, peer: PeerId, upto_tokens: int) -> bool:
        try:
            await self._understudies.ask(chain, peer, upto_tokens)
        except PeerFailed as error:
            logger.debug("nothing is copied: %s", error)
            return False
        return True

    async def _look(self) -> Sequence[SpanRecord]:
        try:
            return await self._swarm.look()
        except NetworkError as error:
            logger.info("the swarm can't be asked for other peers: %s", error)
            return ()

    @property
    def _kept(self) -> Kept:
        assert self._session is not None
        return self._session

    @property
    def _chain(self) -> ChainSession:
        return self._kept.chain


def _left(hop: Hop) -> float:
    """Seconds that its node stays."""
    return max(0.0, (hop.draining_until or 0) - time.monotonic())

"""Hops that wait to take another's place: open, awake, and given what that one holds while it lives."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from swarm.client.chain import ChainSession
from swarm.client.config import Timeouts
from swarm.client.hop import Hop, HopPlace, Network
from swarm.client.links import Neighbours, close_hops, open_at_once
from swarm.errors import SwarmError
from swarm.ids import PeerId, SessionId
from swarm.protocol import clean_text, pb
from swarm.protocol.limits import STATE_BLOCK_TOKENS

logger = logging.getLogger(__name__)


class Understudy:
    """Of one hop, its primary, or of a part of its layers. Nothing is computed in it before a route puts it into the
    chain; what it says till then is only that it is lost."""

    def __init__(
        self,
        hop: Hop,
        primary: PeerId,
        on_copied: Callable[[], None],
        on_lost: Callable[[], None],
        orders: Iterator[int] | None = None,
    ) -> None:
        self.hop = hop
        self.primary = primary
        self.copied_tokens = 0  # as its primary has told
        self.failure = ""  # why nothing more is copied
        self._asked: int | None = None
        self._orders = orders or itertools.count(1)  # of the session: no two understudies have one in common
        self._first_order = self._order = 0
        self._done = False
        self._rolled_back: int | None = None
        self._on_copied = on_copied
        self._on_lost = on_lost

    @property
    def is_settled(self) -> bool:
        """Whether all that was asked for is copied, or nothing more will be."""
        return self._asked is None or self._done or bool(self.failure) or self.hop.failure is not None

    @property
    def is_stale(self) -> bool:
        """Whether more than a block of what was copied may have been computed anew since."""
        return self._rolled_back is not None and self.copied_tokens - self._rolled_back > STATE_BLOCK_TOKENS

    def trusted(self, held: int) -> int:
        """How many of the tokens that it holds are those of the session."""
        return held if self._rolled_back is None else min(held, self._rolled_back)

    def rolled_back(self, start: int) -> None:
        """The session goes on from ``start`` with other tokens: what was copied beyond is of no use, and nobody says
        when it has been replaced."""
        self._rolled_back = start if self._rolled_back is None else min(self._rolled_back, start)

    def settled_in_a_pause(self) -> None:
        """All was copied after the last step had been answered, so nothing of before is left."""
        if self._done:
            self._rolled_back = None

    def request(self, session_id: SessionId, upto_tokens: int) -> pb.CopyState:
        """What its primary is asked; ``upto_tokens`` 0: finished blocks, as they come."""
        self._asked, self._done = upto_tokens or None, False
        self._order = next(self._orders)
        self._first_order = self._first_order or self._order
        first, last = self.hop.place.layers
        return pb.CopyState(
            session_id=session_id,
            understudy=self.hop.place.neighbour(),
            run=pb.Layers(first=first, last=last),
            upto_tokens=upto_tokens,
            order=self._order,
        )

    def note(self, copied: pb.Copied) -> None:
        if not self._first_order or copied.order < self._first_order:
            return  # of one that waited on the same node before
        self.copied_tokens = copied.position
        # what answers an earlier order may be of a time before the session went back
        self._done = copied.done and copied.order == self._order
        self._on_copied()
        if copied.failure and not self.failure:
            self.failure = clean_text(copied.failure)
            logger.info("what peer %s holds is copied no more: %s", self.primary, self.failure)
            self._on_lost()
        elif self.is_stale:
            self._on_lost()

    # --- what it says (HopEvents)

    def on_answer(self, answer: pb.Answer) -> None:
        """Of no use."""

    def on_row(self, row: pb.Row) -> None:
        """Of no use."""

    def on_link_failed(self, hop: Hop, failed: pb.LinkFailed) -> None:
        """Of no use."""

    def on_refusal(self, hop: Hop, error: SwarmError) -> None:
        logger.info("an understudy: %s", error)

    def on_failure(self, hop: Hop, error: SwarmError) -> None:
        logger.info("an understudy is lost: %s", error)
        self._on_lost()


class Understudies:
    """Of one session. Those of one primary cover its layers together: without one of them the others are of no use.
    ``on_lost`` is told when one is of no more use, or another may come. ``close`` waits until all are closed."""

    def __init__(self, network: Network, timeouts: Timeouts) -> None:
        self._network = network
        self._timeouts = timeouts
        self._of: dict[PeerId, list[Understudy]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._orders = itertools.count(1)
        self._changed = asyncio.Event()
        self._going_back: int | None = None  # hops may hold other tokens from there on
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def is_going_back(self) -> bool:
        """Whether hops may still hold, and copy, what was rolled back."""
        return self._going_back is not None

    def of(self, primary: PeerId) -> list[Understudy]:
        """In the order of their layers; none when one of them is lost."""
        found = self._of.get(primary, [])
        return [] if any(one.hop.failure is not None for one in found) else found

    def ready(self) -> list[Understudy]:
        """All that could take over now."""
        return [one for primary in self._of for one in self.of(primary)]

    def peers(self) -> frozenset[PeerId]:
        return frozenset(one.hop.place.peer_id for found in self._of.values() for one in found)

    async def open(self, chain: ChainSession, index: int, places: Sequence[HopPlace]) -> None:
        """Understudies of the hop at ``index``. Raises what a hop's opening raises; none is open then."""
        primary = chain.hops[index]
        seats = [*chain.places[:index], *places, *chain.places[index + 1 :]]
        numbered = [replace(place, index=at) for at, place in enumerate(seats)]
        neighbours = Neighbours(self._network.peer_id, numbered)
        terms = replace(chain.terms, numerics_id=primary.numerics_id)

        def opening(place: HopPlace) -> pb.Open:
            message = neighbours.opening(place.index, terms, chain.session_id, chain.epoch)
            message.understudy_of.CopyFrom(primary.place.neighbour())
            return message

        new = numbered[index : index + len(places)]
        hops = await open_at_once(self._network, new, opening, chain.session_id, self._timeouts)
        told = (self._changed.set, self._lost, self._orders)
        found = [Understudy(hop, primary.place.peer_id, *told) for hop in hops]
        self.drop(primary.place.peer_id, chain.session_id)
        self._of[primary.place.peer_id] = found
        for one in found:
            one.hop.attend(one, self._timeouts)
            if self._going_back is not None:
                one.rolled_back(self._going_back)

    async def ask(self, chain: ChainSession, primary: PeerId, upto_tokens: int) -> None:
        """Raises PeerFailed when the primary is gone."""
        hop = next(hop for hop in chain.hops if hop.place.peer_id == primary)
        for one in self.of(primary):
            await hop.send(one.request(chain.session_id, upto_tokens))

    async def settled(self, primary: PeerId, chain: ChainSession, seconds: float) -> None:
        """Returns when all is copied that was asked for, or no more will be; when ``chain`` has failed; or then."""
        ends = {
            asyncio.create_task(chain.broken(), name="chain session"),
            asyncio.create_task(self._all_settled(primary), name="chain session"),
        }
        try:
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.wait(ends)

    async def _all_settled(self, primary: PeerId) -> None:
        while not all(one.is_settled for one in self._of.get(primary, [])):
            self._changed.clear()
            await self._changed.wait()

    def note(self, primary: PeerId, copied: pb.Copied) -> None:
        for one in self._of.get(primary, []):
            if one.hop.place.peer_id == copied.understudy:
                one.note(copied)

    def rolled_back(self, start: int) -> None:
        self._going_back = start if self._going_back is None else min(self._going_back, start)
        for found in self._of.values():
            for one in found:
                one.rolled_back(start)
                if one.is_stale:
                    self._lost()

    def gone_back(self) -> None:
        """Every hop has computed what was sent since the session went back."""
        if self._going_back is not None:
            self._going_back = None
            self.on_lost()

    def taken(self, hops: Iterable[Hop | None]) -> None:
        """Those of them that are understudies belong to a chain from now on."""
        gone = set(hops)
        for primary, found in list(self._of.items()):
            if any(one.hop in gone for one in found):
                del self._of[primary]

    def drop(self, primary: PeerId, session_id: SessionId) -> None:
        """Frees their slots, in the background."""
        for one in self._of.pop(primary, []):
            task = asyncio.create_task(one.hop.close(session_id), name="chain session")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def drop_useless(self, chain: ChainSession) -> None:
        """Those that are lost, and those of hops that are not in the chain any more."""
        peers = {place.peer_id for place in chain.places}
        for primary, found in list(self._of.items()):
            broken = any(one.failure or one.is_stale for one in found) or not self.of(primary)
            if broken or primary not in peers:
                self.drop(primary, chain.session_id)

    async def close(self, session_id: SessionId) -> None:
        found = [one.hop for several in self._of.values() for one in several]
        self._of.clear()
        await asyncio.gather(close_hops(found, session_id), *self._closing)

    def _lost(self) -> None:
        self._changed.set()
        self.on_lost()

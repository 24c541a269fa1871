"""Puts other hops in the place of those that were lost, and brings all to where the session was.

One rule for every case. Under a new epoch each hop is told its neighbours, the exit first, and answers with what it
holds; a hop whose journal has what its successor lacks pushes it, otherwise it is fed anew by the hop before. What the
entry lacks comes from the client's own tokens. A loss on the way begins the next epoch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dht.record import SpanRecord
from swarm.client.blame import Avoided, is_to_blame
from swarm.client.case import Case
from swarm.client.chain import ChainSession, StepRequest, Trouble
from swarm.client.config import ClientConfig
from swarm.client.hop import Hop, Network
from swarm.client.links import Neighbours, attach
from swarm.client.reminder import Reminder
from swarm.client.seats import Seat, filled, stand_ins, with_retained, with_understudies, without_broken_links
from swarm.client.understudy import Understudies
from swarm.errors import (
    ContextExceeded,
    NetworkError,
    NodeFull,
    NoRoute,
    PeerFailed,
    SessionLost,
    SessionPoisoned,
    SwarmError,
)
from swarm.ids import PeerId
from swarm.protocol import pb
from swarm.replay import Track
from swarm.routing import RouteRequest

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.3
MAX_ATTEMPTS = 32  # of one interruption
PATIENCE = 2  # times that a link or a hop may be in trouble before it is left out
RETRY_SECONDS = 2.0  # before a peer that did not come is asked again
FIRST_PAUSE_SECONDS = 0.01  # before the third attempt and on, growing
# what a peer says of the session, not of itself: one may be wrong, so it is left out; two are believed
VERDICTS = (ContextExceeded, SessionPoisoned)
MENDABLE = (PeerFailed, *VERDICTS)

Records = Sequence[SpanRecord]
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Swarm:
    """What a recovery knows of the swarm: ``recent`` records at hand, and ``look`` for fresh ones."""

    network: Network
    recent: Callable[[], Records]
    look: Callable[[], Awaitable[Records]]
    request: RouteRequest


class Recovery:
    """Of one session. ``close`` waits until the hops that were given up are closed."""

    def __init__(
        self, swarm: Swarm, config: ClientConfig, avoided: Avoided, on_status: Callable[[str], None] = logger.info
    ) -> None:
        self._swarm = swarm
        self._avoided = avoided
        self._waiting = Reminder(on_status)
        self.understudies = Understudies(swarm.network, config.timeouts.impatient())
        self._timeouts = config.timeouts.impatient()
        self._closing: set[asyncio.Task[None]] = set()
        self._refused: dict[PeerId, float] = {}  # until when peers that did not come are not asked again
        self._retained: list[Seat] = []  # hops that shall be replaced, till somebody is there

    async def mend(
        self, chain: ChainSession, track: Track[Tokens], pending: Sequence[StepRequest], case: Case
    ) -> tuple[ChainSession, list[int]]:
        """The session on a chain that holds what ``track`` says, with the ``pending`` steps under way again, and their
        numbers there. Takes ``chain``, which has failed, apart. Raises SessionLost and what two peers say of the
        session; every hop is given up then, as when it is cancelled."""
        seats: list[Seat] = []
        epochs = itertools.count(chain.epoch + 1)
        self._refused.clear()
        self._retained.clear()
        self._waiting.forget()
        try:
            while True:
                await self._take_apart(seats, chain, case)
                chain, needed = await self._linked(seats, chain, track.end, epochs, case)
                try:
                    return chain, await self._sent_again(chain, track, needed, pending)
                except MENDABLE as error:
                    logger.info("the session broke again while it was replayed: %s", error)
        except BaseException:
            for seat in (*seats, *self._retained):
                self._give_up(seat, chain)
            self._later(chain.close())
            raise

    async def can_replace(self, chain: ChainSession, index: int, by: PeerId | None = None) -> bool:
        """Whether others that behave, or ``by``, can serve the layers of one hop while all others stay."""
        waiting = self.understudies.of(chain.hops[index].place.peer_id)
        if any(one.hop.place.peer_id == by for one in waiting):
            return True
        seats = [Seat(hop.place, hop.numerics_id, hop) for hop in chain.hops]
        request = replace(
            self._swarm.request,
            context_tokens=chain.terms.context_tokens,
            banned=self._avoided.now() | self.understudies.peers(),
            banned_edges=self._avoided.edges(),
        )
        try:
            records = await self._look()
            stand_ins(seats, index, [record for record in records if by in (None, record.peer_id)], request)
        except (NoRoute, ContextExceeded):
            return False
        return True

    def held_up(self, refusal: NodeFull) -> None:
        """A hop that goes on makes the session wait."""
        why = str(refusal).partition("; ")[0]
        self._waiting.tell(f"waiting {refusal.retry_after_seconds:.1f} s to go on: {why}", why)

    async def close(self) -> None:
        await asyncio.gather(*self._closing)

    # --- what is left of a chain

    async def _take_apart(self, seats: list[Seat], chain: ChainSession, case: Case) -> None:
        seats[:] = [Seat(hop.place, hop.numerics_id, hop) for hop in await chain.release()]
        self._later(chain.close())
        for trouble in chain.troubles:
            self._note(trouble, case)
        case.attempts += 1
        if case.attempts > MAX_ATTEMPTS:
            raise _lost(case, NoRoute("it broke again and again; try again later"))
        await asyncio.sleep(min(FIRST_PAUSE_SECONDS * 2**case.attempts, POLL_SECONDS) if case.attempts > 2 else 0)
        for index, seat in enumerate(seats):
            peer = seat.place.peer_id
            is_lost = any(_is_lost(trouble) and trouble.place.peer_id == peer for trouble in chain.troubles)
            if is_lost or case.troubles[peer, None] >= PATIENCE:
                self._empty(seats, index, chain, case)
            elif peer in case.leaving:
                self._retained.append(seat)
                seats[index] = seat.emptied()
        case.replaced |= case.leaving
        case.leaving.clear()

    def _note(self, trouble: Trouble, case: Case) -> None:
        case.tell(trouble.error)
        case.voluntary = False
        logger.info("%s", trouble.error)
        if not isinstance(trouble.error, MENDABLE):
            raise trouble.error
        peer, successor = trouble.place.peer_id, trouble.successor
        if _is_lost(trouble):
            self._blame(peer, trouble.error, case)
            return
        case.troubles[peer, successor] += 1
        if successor is not None and case.troubles[peer, successor] >= PATIENCE:
            self._avoided.add_edge(peer, successor)

    def _blame(self, peer: PeerId, error: SwarmError, case: Case) -> None:
        if isinstance(error, VERDICTS) and case.agreed(peer, error):
            raise error
        if is_to_blame(error):
            self._avoided.add(peer)
        if error.code == pb.NODE_DRAINING:
            case.replaced.add(peer)  # its record may say it later
        if error.code != pb.ENGINE_LOST:
            return
        case.engine_losers.add(peer)
        if error.blamed and case.suspicion.engine_died(peer, case.pending_end):
            raise SessionPoisoned(
                f"the steps from position {case.position} on ended {case.suspicion.engines} engines ({case.told()}); "
                "start a new session with another prompt"
            )

    def _empty(self, seats: list[Seat], index: int, chain: ChainSession, case: Case) -> None:
        seat = seats[index]
        case.lost.pop(seat.place.peer_id, None)  # it becomes the last one
        case.lost[seat.place.peer_id] = seat.layers
        self._give_up(seat, chain)
        seats[index] = seat.emptied()

    def _give_up(self, seat: Seat, chain: ChainSession) -> None:
        if seat.hop is not None:
            self._later(seat.hop.close(chain.session_id))

    def _later(self, closing: Coroutine[None, None, None]) -> None:
        """A peer that is gone may take seconds to be closed: nobody waits for that."""
        task = asyncio.create_task(closing, name="chain session")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # --- a new chain

    async def _linked(
        self, seats: list[Seat], chain: ChainSession, held: int, epochs: Iterator[int], case: Case
    ) -> tuple[ChainSession, int]:
        """Fills the empty seats and puts all under one epoch, as often as it takes; also tells from which position the
        entry must be fed. ``seats`` is kept up to date: it says which hops are open."""
        while True:
            await self._fill(seats, chain, case)
            epoch = next(epochs)
            needed = await self._rerouted(seats, chain, held, epoch, case)
            hops = [seat.hop for seat in seats if seat.hop is not None]
            if needed is None:
                continue
            try:
                data = await attach(self._swarm.network, hops[0].place, chain.session_id, self._timeouts, epoch)
            except MENDABLE as error:
                self._lose(seats, 0, error, chain, case)
                continue
            case.linked, case.waiting_since = time.monotonic(), None
            self._part(hops, chain, case)
            case.came |= {hop.place.peer_id: hop.place.layers for hop in hops if hop.place not in chain.places}
            return ChainSession(chain.terms, chain.session_id, hops, data, chain.timeouts, epoch), needed

    def _part(self, hops: Sequence[Hop], chain: ChainSession, case: Case) -> None:
        """Gives up those that others have replaced."""
        for seat in self._retained:
            if seat.hop not in hops:
                case.lost[seat.place.peer_id] = seat.layers
                self._give_up(seat, chain)
        self._retained.clear()

    async def _fill(self, seats: list[Seat], chain: ChainSession, case: Case) -> None:
        """Plans who takes the empty seats; waits while nobody can. Raises SessionLost."""
        records, fresh = self._swarm.recent(), False
        while True:
            for index, seat in enumerate(seats):
                if seat.hop is not None and seat.hop.failure is not None:
                    self._lose(seats, index, seat.hop.failure, chain, case)
            try:
                planned = self._planned(seats, records, chain, case)
                break
            except (NoRoute, ContextExceeded) as error:
                if fresh:
                    await self._wait(error, case)
            records, fresh = await self._look(), True
        staying = {seat.hop for seat in planned}
        self.understudies.taken(staying)
        for index, seat in enumerate(seats):
            if seat.hop is not None and seat.hop not in staying:
                self._empty(seats, index, chain, case)
        seats[:] = planned

    def _planned(self, seats: Sequence[Seat], records: Records, chain: ChainSession, case: Case) -> list[Seat]:
        """Around banned peers and links if there is a way, else with hops that were to be replaced, and around those
        that were lost, of whom the first may be well again before the last; those that did not come are asked again
        after a pause, those that won't have this session not at all."""
        now = time.monotonic()
        refused = frozenset(peer for peer, until in self._refused.items() if until > now) | case.verdicts.keys()
        request = replace(self._swarm.request, context_tokens=chain.terms.context_tokens)
        others_first = self._avoided.now() | case.engine_losers | case.replaced | self.understudies.peers()
        banned, edges = refused | others_first, self._avoided.edges()
        waiting = self.understudies.ready()
        try:
            around = replace(request, banned=banned, banned_edges=edges)
            unbroken = without_broken_links(seats, edges)
            if wanted := [record for record in records if record.peer_id in case.wanted]:
                with suppress(NoRoute, ContextExceeded):
                    return filled(unbroken, wanted, around)
            return filled(with_understudies(unbroken, waiting), records, around)
        except (NoRoute, ContextExceeded):
            seats = with_understudies(with_retained(seats, self._retained), waiting)
        lost = tuple(case.lost)
        for n_forgiven in range(len(lost)):
            with suppress(NoRoute, ContextExceeded):
                return filled(seats, records, replace(request, banned=refused.union(lost[n_forgiven:])))
        return filled(seats, records, replace(request, banned=refused))

    async def _look(self) -> Records:
        try:
            return await self._swarm.look()
        except NetworkError as error:
            logger.info("the swarm can't be asked for other peers: %s", error)
            return ()

    async def _wait(self, reason: SwarmError, case: Case) -> None:
        now = time.monotonic()
        if case.waiting_since is None:
            case.waiting_since = now
        patience = self._timeouts.recover_seconds if case.patience_seconds is None else case.patience_seconds
        left = case.waiting_since + patience - now
        if left <= 0:
            raise _lost(case, reason)
        why = f"{str(reason).partition('; ')[0]} ({case.told()})"
        self._waiting.tell(f"waiting up to {left:.0f} s more to go on: {why}", why)
        await asyncio.sleep(min(POLL_SECONDS, left))

    async def _rerouted(self, seats: list[Seat], chain: ChainSession, held: int, epoch: int, case: Case) -> int | None:
        """Tells every hop its place, from the exit to the entry. None when one was lost over it."""
        neighbours = Neighbours(self._swarm.network.peer_id, [seat.place for seat in seats])
        lowest = needed = held
        for index in reversed(range(len(seats))):
            place, hop = seats[index].place, seats[index].hop
            try:
                if hop is None:
                    opening = neighbours.opening(index, chain.terms, chain.session_id, epoch, needed)
                    opening.suspect = case.suspicion.told_to(place.peer_id)
                    hop = await Hop.open(self._swarm.network, place, opening, self._timeouts)
                    hop.attend(None, chain.timeouts)
                    seats[index] = Seat(place, hop.numerics_id, hop)
                    needed = 0
                else:
                    hop.place = place
                    understudy = seats[index].understudy
                    keep = held if understudy is None else understudy.trusted(held)
                    route = neighbours.reroute(index, chain.session_id, epoch, needed, keep)
                    route.suspect = case.suspicion.told_to(place.peer_id)
                    rerouted = await hop.reroute(route, self._timeouts.open_seconds)
                    needed = rerouted.position if rerouted.pushes else min(needed, rerouted.position)
                    if understudy is not None:
                        case.took_over(rerouted.position)
            except SwarmError as error:
                self._lose(seats, index, error, chain, case)
                return None
            lowest = min(lowest, needed)
        case.replayed_tokens = held - lowest
        return needed

    def _lose(self, seats: list[Seat], index: int, error: SwarmError, chain: ChainSession, case: Case) -> None:
        """A hop failed, or one that should come did not."""
        if not error.peer:
            raise error
        case.tell(error)
        logger.info("%s", error)
        peer = seats[index].place.peer_id
        if seats[index].hop is None:
            limited = error.retry_after_seconds if isinstance(error, NodeFull) else 0.0
            self._refused[peer] = time.monotonic() + max(RETRY_SECONDS, limited)
            if isinstance(error, ContextExceeded):
                return  # of its slots, not of the session
        else:
            self._empty(seats, index, chain, case)
        self._blame(peer, error, case)

    async def _sent_again(
        self, chain: ChainSession, track: Track[Tokens], needed: int, pending: Sequence[StepRequest]
    ) -> list[int]:
        for step in track.replay(needed, chain.terms.chunk_tokens):
            tokens = [token for part in step.slices for token in part.content[part.first : part.last]]
            await chain.replay(step.start, tokens, pb.PREFILL if step.chunk else pb.DECODE)
        return [await chain.send(request) for request in pending]


def _is_lost(trouble: Trouble) -> bool:
    return trouble.lost or isinstance(trouble.error, VERDICTS)


def _lost(case: Case, reason: SwarmError) -> SessionLost:
    why, _, advice = str(reason).partition("; ")
    seconds = time.monotonic() - case.began
    return SessionLost(
        f"the session was lost at position {case.position} after {seconds:.0f} s: {case.told()}, and nobody took over "
        f"({why}); {advice}"
    )

"""A session that outlives its hops: what it answers is what an undisturbed chain would have answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm.client.blame import Avoided
from swarm.client.case import Case
from swarm.client.chain import ChainSession, StepAnswer, StepRequest
from swarm.client.hop import HopPlace, Network, peer_failed
from swarm.client.keeper import Keeper
from swarm.client.links import ForkOf
from swarm.client.recovery import MENDABLE, Recovery
from swarm.client.scout import Scout
from swarm.client.suspicion import Suspicion
from swarm.client.trace import RecoveryTrace
from swarm.errors import ContextExceeded, SwarmError, UsageError
from swarm.ids import PeerId, SessionId
from swarm.protocol import pb
from swarm.replay import Track

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Sent:
    """A step from being sent to being part of what is held; ``number`` is the chain's."""

    request: StepRequest
    number: int = 0
    answer: StepAnswer | None = None
    chain: ChainSession | None = None  # that answered


class LastingSession:
    """An open session. Use it as a context manager: leaving it, or cancelling inside, frees the slot of every hop.

    Calls wait while lost hops are replaced. Raises SessionLost when that takes too long, SessionPoisoned when the steps
    end engines, ContextExceeded; every later call raises the same.
    """

    def __init__(
        self,
        chain: ChainSession,
        recovery: Recovery,
        avoided: Avoided,
        on_closed: Callable[[LastingSession], None] = lambda _: None,
        track: Track[tuple[int, ...]] | None = None,
        keeper: Keeper | None = None,
        scout: Scout | None = None,
    ) -> None:
        self.terms = chain.terms
        self.recoveries: list[RecoveryTrace] = []
        self._chain = chain
        self._recovery = recovery
        self._avoided = avoided
        self._keeper = keeper
        self._on_closed = on_closed
        self._scout = scout
        self._failure: SwarmError | None = None
        self._case: Case | None = None
        self._suspicion = Suspicion()
        self._served = False  # whether this chain has answered
        self._track: Track[tuple[int, ...]] = track or Track()  # what the chain holds
        self._sent: dict[int, _Sent] = {}  # in the order they were sent; not booked yet
        self._untaken: dict[int, _Sent] = {}  # whose answers the caller has not got
        self._last_number = 0
        self._last: StepRequest | None = None  # of those answered
        self._last_chain: ChainSession | None = None  # whose exit keeps its row
        self._order = asyncio.Lock()  # of sending, and of mending
        self._mending: asyncio.Task[tuple[ChainSession, list[int]]] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._watch()
        if scout is not None:
            scout.watch(self)

    async def __aenter__(self) -> LastingSession:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Frees the slots, which goes on when this is cancelled: nobody might call it again. Safe to call again."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="chain session")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._failure is None:
            self._failure = SwarmError("the session is closed; open a new one")
        if self._scout is not None:
            await self._scout.close()
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait({self._mending})
        if self._keeper is not None:
            await self._keeper.close()
        await asyncio.gather(self._chain.close(), self._recovery.understudies.close(self.session_id))
        await self._recovery.close()
        self._on_closed(self)

    @property
    def chain(self) -> ChainSession:
        """Of the current epoch; another one after every loss."""
        return self._chain

    @property
    def held_tokens(self) -> int:
        """Tokens that stay whatever becomes of the steps under way."""
        return min([self._track.end, *(sent.request.start for sent in [*self._sent.values()][:1])])

    @property
    def session_id(self) -> SessionId:
        return self._chain.session_id

    @property
    def places(self) -> tuple[HopPlace, ...]:
        """The hops as they are now."""
        return self._chain.places

    @property
    def numerics_ids(self) -> tuple[str, ...]:
        """Of the hops as they are now."""
        return self._chain.numerics_ids

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those whose steps were answered, in order: a step may start at any of them, or after the last."""
        return tuple(token for part in self._track.counted() for token in part.content[part.first : part.last])

    def rest(self) -> bool:
        """Forgets the steps under way, whose answers nobody is going to take: the next step overwrites what they
        compute. False when the session is of no more use."""
        if self._failure is not None or self._chain.failure is not None or self._order.locked():
            return False
        for sent in self._sent.values():
            self._track.truncate(sent.request.start)
            self._recovery.understudies.rolled_back(sent.request.start)
        self._sent.clear()
        self._untaken.clear()
        return True

    async def resume(self, seconds: float) -> bool:
        """Replaces hops that were lost while the session rested. False when nobody takes over within ``seconds``, or
        when it fails in another way: it is closed then, as when this is cancelled."""
        resumed = False
        try:
            async with self._order:
                if self._chain.failure is not None:
                    self._case = self._case or self._new_case()
                    self._case.patience_seconds = seconds
                    await self._mend()
                    self._case.patience_seconds = None
            resumed = True
        except SwarmError as error:
            logger.info("%s", error)
        finally:
            if not resumed:
                await self.close()
        return resumed

    async def send(self, request: StepRequest) -> int:
        """Sends a step and returns its number for ``answer``. Waits while the transport is full or hops are missing."""
        async with self._order:
            if self._failure is not None:
                raise self._failure
            end = self._check_start(request)
            if self._case is not None and not self._sent:
                self._case.paused()
            if request.start < end and request is not self._last:  # what is repeated stays the same
                self._recovery.understudies.rolled_back(request.start)
            self._last_number += 1
            number = self._last_number
            sent = self._sent[number] = self._untaken[number] = _Sent(request)
            try:
                sent.number = await self._chain.send(request)
            except MENDABLE:
                await self._mend()  # which sends it, too
        return number

    async def answer(self, number: int) -> StepAnswer:
        """Waits for the answer to one step; each may be taken once."""
        sent = self._untaken[number]
        while sent.answer is None:
            chain = self._chain
            try:
                answer = await chain.answer(sent.number)
            except MENDABLE:
                await self._mended(chain)
                continue
            if sent.answer is None:
                sent.answer, sent.chain = answer, chain
                if self._scout is not None:
                    self._scout.note(chain, sent.request, answer)
                self._settle()
        del self._untaken[number]
        return sent.answer

    async def step(self, request: StepRequest) -> StepAnswer:
        return await self.answer(await self.send(request))

    async def fetch_row(self, position: int) -> npt.NDArray[np.float32]:
        """The whole logits row of the last wanted ``position``; the exit keeps it until its next step."""
        if self._last is None:
            raise UsageError("the session has answered no step yet; send one that asks for a row")
        while True:
            chain = self._chain
            if self._last_chain is not chain:
                await self.step(self._last)  # the exit may be another one, or keep it no more: it is computed again
                continue
            try:
                return await chain.fetch_row(position, self._recovery.held_up)
            except MENDABLE:
                await self._mended(chain)

    async def replace(self, index: int, reason: str, by: PeerId | None = None) -> bool:
        """Puts another hop, ``by`` if possible, in the place of one that is well, and gives that one up without blame;
        what others lack is replayed. Returns whether that was done: not without somebody to take over, nor when the
        chain breaks meanwhile, which the next call mends. Raises what a recovery raises; ``reason`` is told in its
        trace."""
        place = self._chain.places[index]
        chain = self._chain
        if not await self._recovery.can_replace(chain, index, by):
            return False
        async with self._order:
            if chain is not self._chain or chain.failure is not None:
                return False
            case = self._case or Case(self.held_tokens, suspicion=self._suspicion, voluntary=True)
            case.wanted = {by} if by is not None else set()
            return await self._swapped(place, f"is replaced ({reason})", case)

    async def hand_over(self, peer: PeerId, seconds: float) -> bool:
        """Puts the understudies of a hop, whose node leaves within ``seconds``, in its place once they hold all that
        the session holds. Nothing is sent meanwhile; so what takes too long to be copied, or can't be, is replayed.
        Returns whether the hop is out of the chain."""
        understudies = self._recovery.understudies
        async with self._order:
            began, chain = time.monotonic(), self._chain
            place = next((place for place in chain.places if place.peer_id == peer), None)
            if place is None:
                return True
            if not await chain.quiet(seconds) or chain.failure is not None:
                return False
            await self._collect(chain)
            held = self.held_tokens
            if held:
                await understudies.ask(chain, peer, held)
                await understudies.settled(peer, chain, min(seconds, chain.timeouts.hand_over_seconds))
            waiting = understudies.of(peer)
            if not waiting or chain.failure is not None:
                return False
            for one in waiting:
                one.settled_in_a_pause()
            case = self._case or Case(held, suspicion=self._suspicion, began=began, voluntary=True)
            return await self._swapped(place, "leaves the swarm", case)

    async def forked(self, network: Network) -> tuple[ChainSession, Track[tuple[int, ...]]]:
        """Another session of the same hops that holds the same, and what that is; hops that are missing are replaced
        first. Raises UsageError while steps are under way, PeerFailed when a hop can't copy what it holds."""
        async with self._order:
            if self._sent:
                raise UsageError("steps of the session are under way; take their answers before you fork it")
            while True:
                if self._failure is not None:
                    raise self._failure
                try:
                    if self._chain.failure is not None:
                        await self._mend()
                        await self._caught_up()
                    return await self._forked(network), self._track.copy()
                except MENDABLE:
                    if self._chain.failure is None:
                        raise

    # --- inside

    async def _forked(self, network: Network) -> ChainSession:
        held = self._track.end
        fork_of = ForkOf(self.session_id, held)
        chain = await ChainSession.open(network, self.places, self.terms, self._chain.timeouts, fork_of)
        if chain.held < held:
            await chain.close()
            raise peer_failed(self.places[0], f"copied {chain.held} of {held} tokens")
        return chain

    async def _caught_up(self) -> None:
        """Returns when every hop of a mended chain holds what is held: the answer to its last step tells."""
        for step in self._track.replay(max(self._track.end - 1, 0), self.terms.chunk_tokens):
            tokens = [token for part in step.slices for token in part.content[part.first : part.last]]
            await self._chain.step(StepRequest(step.start, tokens, pb.PREFILL if step.chunk else pb.DECODE))

    def _check_start(self, request: StepRequest) -> int:
        """Where the session ends before it. A gap, and what is beyond the context, would be refused by the first hop,
        and look like its failure."""
        last = next(reversed(self._sent.values()), None)
        end = self._track.end if last is None else last.request.start + len(last.request.tokens)
        if request.start > end:
            raise UsageError(f"a step starts at {request.start}, after {end} tokens; send those between first")
        beyond = request.start + len(request.tokens)
        if beyond > self.terms.context_tokens:
            raise ContextExceeded(
                f"a step ends at {beyond}, the session was opened for {self.terms.context_tokens} tokens; "
                "open one with a longer context"
            )
        return end

    async def _collect(self, chain: ChainSession) -> None:
        """The answers that are there, although nobody has asked for them yet: their steps need not be sent again."""
        for sent in list(self._sent.values()):
            if sent.answer is None:
                sent.answer, sent.chain = await chain.answer(sent.number), chain
        self._settle()

    async def _swapped(self, place: HopPlace, why: str, case: Case) -> bool:
        """With the lock held. False when nobody came, and the hop has stayed."""
        self._case = case
        case.leaving.add(place.peer_id)
        error = peer_failed(place, why)
        case.tell(error)
        self._chain.retire(error)
        await self._mend()
        return place.peer_id not in [other.peer_id for other in self._chain.places]

    async def _mended(self, chain: ChainSession) -> None:
        async with self._order:
            if chain is self._chain:
                await self._mend()

    async def _mend(self) -> None:
        """With the lock held."""
        if self._failure is not None:
            raise self._failure
        pending = list(self._sent.values())
        held = self.held_tokens
        self._track.truncate(held)
        if self._case is None:
            self._case = self._new_case()
        self._case.pending_end = max((sent.request.start + len(sent.request.tokens) for sent in pending), default=held)
        requests = [sent.request for sent in pending]
        cancellations = _cancellations()
        mending = self._recovery.mend(self._chain, self._track, requests, self._case)
        task = self._mending = asyncio.create_task(mending, name="chain session")
        try:
            self._chain, numbers = await task
        except SwarmError as error:
            self._failure = error
            raise
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:
                self._chain, _ = task.result()  # to be closed with the session
            if self._failure is not None and _cancellations() == cancellations:
                raise self._failure from None
            raise
        finally:
            self._mending = None
        self._served = False
        self._watch()
        for sent, number in zip(pending, numbers, strict=True):
            sent.number = number

    def _new_case(self) -> Case:
        return Case(self.held_tokens, self._chain.silent_seconds, suspicion=self._suspicion)

    def _settle(self) -> None:
        """Books what has been answered without a gap before it."""
        booked: StepAnswer | None = None  # the first one: after a recovery it tells what that took
        while self._sent and (first := next(iter(self._sent.values()))).answer is not None:
            del self._sent[next(iter(self._sent))]
            booked = booked or first.answer
            request = self._last = first.request
            self._last_chain = first.chain
            tokens = tuple(request.tokens)
            self._track.append(request.start, len(tokens), chunk=request.kind == pb.PREFILL, content=tokens)
        self._suspicion.passed(self._track.end)
        if booked is not None and not self._sent:
            self._recovery.understudies.gone_back()
        if self._case is not None and booked is not None:
            self.recoveries.append(self._case.trace(booked.trace))
            self._case = None
        if not self._served:
            self._served = True
            if self._keeper is not None:
                self._keeper.answered()
            self._avoided.forgive_chain([place.peer_id for place in self._chain.places])

    def _watch(self) -> None:
        if self._keeper is not None:
            self._keeper.watch(self)


def _cancellations() -> int:
    """That this task has been asked for; a task group of Python 3.11 may have left some behind."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()

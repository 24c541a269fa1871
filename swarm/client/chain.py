"""A session over a chain: one control stream per hop, a data stream to the entry, steps out, answers in."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarm.client.config import Timeouts
from swarm.client.hop import Hop, HopPlace, Network, now_us, peer_failed, unexpected
from swarm.client.links import FIRST_EPOCH, ForkOf, SessionTerms, attach, close_hops, open_hops
from swarm.client.row import BadRow, checked_row, checked_summary
from swarm.client.steps import StepAnswer, StepRequest, WantedRow
from swarm.client.trace import RecoveryTrace, TracedHop, trace_step
from swarm.errors import NodeFull, ProtocolError, SwarmError
from swarm.ids import PeerId, SessionId
from swarm.protocol import FrameStream, PartJoiner, StreamClosed, WireError, pb, to_swarm_error
from swarm.protocol.limits import first_step

logger = logging.getLogger(__name__)

MIN_PAUSE_SECONDS = 0.1

__all__ = ["ChainSession", "SessionTerms", "StepAnswer", "StepRequest", "WantedRow"]


@dataclass(frozen=True)
class Trouble:
    """What broke a chain. ``lost``: the peer can't stay, whatever it holds. ``successor``: whom it can't reach."""

    place: HopPlace
    error: SwarmError
    lost: bool = False
    successor: PeerId | None = None


@dataclass(frozen=True, eq=False)
class _Pending:
    request: StepRequest
    sent_us: int
    # Failures are results, not exceptions: of several pending steps usually one is awaited.
    outcome: asyncio.Future[StepAnswer | SwarmError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(eq=False)
class _RowFetch:
    position: int
    joiner: PartJoiner
    outcome: asyncio.Future[bytes | SwarmError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class ChainSession:
    """An open session in one epoch. Use it as a context manager: leaving it, or cancelling inside, frees the slot of
    every hop.

    Steps may be in flight together; answers come in order. The first failure of any hop ends everything: every call
    from then on raises it. ``release`` then leaves the hops that are left to a recovery.
    """

    def __init__(
        self,
        terms: SessionTerms,
        session_id: SessionId,
        hops: Sequence[Hop],
        data: FrameStream,
        timeouts: Timeouts,
        epoch: int = FIRST_EPOCH,
    ) -> None:
        self.terms = terms
        self.session_id = session_id
        self.epoch = epoch
        self.failure: SwarmError | None = None
        self.troubles: list[Trouble] = []
        self._hops = tuple(hops)
        self._data = data
        self.timeouts = timeouts
        self._numbers = itertools.count(first_step(-1) if epoch > FIRST_EPOCH else 1)
        self._pending: dict[int, _Pending] = {}
        self._row: _RowFetch | None = None
        self._failed = asyncio.Event()
        self._released = False
        self._runner = asyncio.create_task(self._run(), name="chain session")
        for hop in self._hops:
            hop.attend(self, timeouts)

    @classmethod
    async def open(
        cls,
        network: Network,
        places: Sequence[HopPlace],
        terms: SessionTerms,
        timeouts: Timeouts,
        fork_of: ForkOf | None = None,
    ) -> ChainSession:
        """Opens every hop at once, then attaches to the entry. When one refuses, the others are freed again.

        Raises PeerFailed (NodeFull, IncompatiblePeer, ProtocolError) or another SwarmError that a hop answered with.
        """
        session_id = SessionId(secrets.token_bytes(16))
        hops = await open_hops(network, places, terms, session_id, timeouts, fork_of)
        try:
            data = await attach(network, places[0], session_id, timeouts)
        except BaseException:
            await close_hops(hops, session_id)
            raise
        return cls(terms, session_id, hops, data, timeouts)

    async def __aenter__(self) -> ChainSession:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Frees the slots. Safe to call again."""
        await self._end()
        hops = () if self._released else self._hops
        await asyncio.gather(self._data.close(), close_hops(hops, self.session_id))

    def retire(self, error: SwarmError) -> None:
        """Ends the epoch although nothing has failed: whoever waits for an answer gets ``error``."""
        self._fail(error)

    async def broken(self) -> None:
        """Returns when it has failed or was closed."""
        await self._failed.wait()

    async def quiet(self, seconds: float) -> bool:
        """Whether no step is under way any more after so long."""
        outcomes = [pending.outcome for pending in self._pending.values()]
        return not outcomes or not (await asyncio.wait(outcomes, timeout=seconds))[1]

    async def release(self) -> tuple[Hop, ...]:
        """Ends the epoch and leaves the hops, open or failed, to the caller, who closes them."""
        for hop in self._hops:
            hop.attend(None, self.timeouts)
        await self._end()
        self._released = True
        return self._hops

    @property
    def hops(self) -> tuple[Hop, ...]:
        """They belong to the chain until ``release``."""
        return self._hops

    @property
    def under_way(self) -> tuple[StepRequest, ...]:
        """Steps that were sent and not answered, in order."""
        return tuple(pending.request for pending in self._pending.values() if not pending.outcome.done())

    @property
    def places(self) -> tuple[HopPlace, ...]:
        return tuple(hop.place for hop in self._hops)

    @property
    def held(self) -> int:
        """Tokens that every hop held when it was opened."""
        return min(hop.position for hop in self._hops)

    @property
    def tokens(self) -> tuple[int, ...]:
        """None: a chain keeps no account of what it has computed."""
        return ()

    @property
    def recoveries(self) -> tuple[RecoveryTrace, ...]:
        """None: a chain ends with its first failure."""
        return ()

    @property
    def silent_seconds(self) -> float:
        """Since the last byte of the hop that failed first."""
        failed = self.troubles[0].place.peer_id if self.troubles else ""
        return next((hop.silent_seconds for hop in self._hops if hop.place.peer_id == failed), 0.0)

    @property
    def numerics_ids(self) -> tuple[str, ...]:
        """Of each hop, as it said when it was opened."""
        return tuple(hop.numerics_id for hop in self._hops)

    async def send(self, request: StepRequest) -> int:
        """Sends a step and returns its number for ``answer``. Waits only while the transport is full."""
        self._check()
        number = next(self._numbers)
        self._pending[number] = _Pending(request, now_us())
        await self._send(self._wire_step(number, request))
        return number

    async def replay(self, start: int, tokens: Sequence[int], kind: pb.StepKind.ValueType) -> None:
        """Sends what has been computed before; nobody answers it."""
        self._check()
        step = self._wire_step(next(self._numbers), StepRequest(start, tokens, kind))
        step.replay = True
        await self._send(step)

    async def answer(self, number: int) -> StepAnswer:
        """Waits for the answer to one step, each may be taken once. Raises the session's failure."""
        pending = self._pending[number]
        try:
            async with asyncio.timeout(self.timeouts.step_seconds):
                outcome = await asyncio.shield(pending.outcome)
        except TimeoutError:
            hop = self._stuck(pending.request)
            error = peer_failed(hop.place, f"did not finish a step within {self.timeouts.step_seconds:g} s")
            self._note(Trouble(hop.place, error, lost=True))
            self._check()
            raise
        finally:
            self._pending.pop(number, None)
        if isinstance(outcome, SwarmError):
            raise outcome
        return outcome

    async def step(self, request: StepRequest) -> StepAnswer:
        return await self.answer(await self.send(request))

    async def fetch_row(
        self, position: int, on_refused: Callable[[NodeFull], None] = lambda _: None
    ) -> npt.NDArray[np.float32]:
        """The whole logits row of the last wanted ``position``; the exit keeps it until its next step. When that gives
        no more for a while, ``on_refused`` is told and it is asked again."""
        self._check()
        exit_hop = self._hops[-1]
        try:
            async with asyncio.timeout(self.timeouts.step_seconds):
                while isinstance(outcome := await self._ask_row(position), NodeFull):
                    on_refused(outcome)
                    await self._wait_or_fail(outcome.retry_after_seconds)
        except TimeoutError:
            error = peer_failed(exit_hop.place, "did not send the logits row asked for")
            self._note(Trouble(exit_hop.place, error, lost=True))
            self._check()
            raise
        finally:
            self._row = None
        if isinstance(outcome, SwarmError):
            raise outcome
        try:
            return checked_row(outcome, self.terms.n_vocab)
        except BadRow as error:
            self._nonsense(error)
            self._check()
            raise

    async def _ask_row(self, position: int) -> bytes | SwarmError:
        fetch = self._row = _RowFetch(position, PartJoiner(4 * self.terms.n_vocab))
        await self._hops[-1].send(pb.RowRequest(session_id=self.session_id, position=position))
        return await fetch.outcome

    async def _wait_or_fail(self, seconds: float) -> None:
        """The exit gives no more rows for a while. Raises the session's failure."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._failed.wait(), max(seconds, MIN_PAUSE_SECONDS))
        self._check()

    # --- what hops say (HopEvents)

    def on_answer(self, answer: pb.Answer) -> None:
        answered_us = now_us()
        pending = self._pending.get(answer.step)
        if answer.session_id != self.session_id or answer.epoch != self.epoch or pending is None:
            logger.debug("a late answer to step %d is dropped", answer.step)
            return
        if pending.outcome.done():
            return
        try:
            pending.outcome.set_result(self._answered(pending, answer, answered_us))
        except BadRow as error:
            self._nonsense(error)

    def on_row(self, row: pb.Row) -> None:
        fetch = self._row
        if fetch is None or row.position != fetch.position or fetch.outcome.done():
            return
        try:
            data = fetch.joiner.add(row)
        except WireError as error:
            self._nonsense(error)
            return
        if data is not None:
            fetch.outcome.set_result(data)

    def on_link_failed(self, hop: Hop, failed: pb.LinkFailed) -> None:
        if failed.epoch != self.epoch:
            return
        place = next((other.place for other in self._hops if other.place.peer_id == failed.successor), hop.place)
        cause = to_swarm_error(StreamClosed(failed.cause), hop.place.peer_id, hop.place.layers)
        logger.debug("link failed: %s", cause)
        error = peer_failed(place, f"can't be reached from peer {hop.place.peer_id}")
        self._note(Trouble(hop.place, error, successor=PeerId(failed.successor)))

    def on_refusal(self, hop: Hop, error: SwarmError) -> None:
        if self._row is not None and error.code == pb.LIMIT_REACHED:
            if not self._row.outcome.done():
                self._row.outcome.set_result(error)
            return
        self._note(Trouble(hop.place, error))

    def on_failure(self, hop: Hop, error: SwarmError) -> None:
        self._note(Trouble(hop.place, error, lost=True))

    # --- inside

    async def _run(self) -> None:
        reading = asyncio.create_task(self._read_data(), name="chain session")
        try:
            await self._failed.wait()
            await self._data.close()  # a send may hang on an entry that takes no more
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def _end(self) -> None:
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)
        self._fail(SwarmError("the session is closed; open a new one"))

    async def _send(self, step: pb.Step) -> None:
        entry = self._hops[0].place
        try:
            async with asyncio.timeout(self.timeouts.step_seconds):
                await self._data.send_step(step)
        except (StreamClosed, TimeoutError) as error:
            what = "takes no steps" if isinstance(error, TimeoutError) else "closed the connection"
            self._note_of_entry(peer_failed(entry, what))
            self._check()

    async def _read_data(self) -> None:
        """The entry says nothing here but that it lives, unless something is wrong."""
        entry = self._hops[0].place
        try:
            while isinstance(body := await self._data.receive(), pb.Pong):
                pass
        except (StreamClosed, WireError) as error:
            cause = to_swarm_error(error, entry.peer_id, entry.layers)
        else:
            if isinstance(body, pb.Error):
                cause = to_swarm_error(body, entry.peer_id, entry.layers)
            else:
                cause = peer_failed(entry, "closed the connection") if body is None else unexpected(entry, body)
        self._note_of_entry(cause)

    def _wire_step(self, number: int, request: StepRequest) -> pb.Step:
        row = request.row
        output = pb.OutputRequest(last_row=True, temperature=row.temperature, top=row.top, ids=row.ids) if row else None
        return pb.Step(
            session_id=self.session_id,
            epoch=self.epoch,
            step=number,
            start=request.start,
            n_tokens=len(request.tokens),
            kind=request.kind,
            tokens=request.tokens,
            output=output,
        )

    def _answered(self, pending: _Pending, answer: pb.Answer, answered_us: int) -> StepAnswer:
        request = pending.request
        n_tokens = len(request.tokens)
        hops = [TracedHop(hop.place.peer_id, hop.place.layers, hop.clock) for hop in self._hops]
        trace = trace_step(answer, hops, request.start, n_tokens, pending.sent_us, answered_us)
        if request.row is None:
            return StepAnswer(None, answer.numerics_id, trace)
        if len(answer.rows) != 1:
            raise BadRow(f"{len(answer.rows)} rows instead of one")
        row = checked_summary(answer.rows[0], len(request.row.ids), self.terms.n_vocab)
        return StepAnswer(row, answer.numerics_id, trace)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _note_of_entry(self, error: SwarmError) -> None:
        if self.failure is None:  # else it was this side that closed the stream
            self._note(Trouble(self._hops[0].place, error))

    def _note(self, trouble: Trouble) -> None:
        logger.debug("hop %d: %s", trouble.place.index, trouble.error)
        self.troubles.append(trouble)
        self._fail(trouble.error)

    def _fail(self, error: SwarmError) -> None:
        if self.failure is None:
            self.failure = error
            self._failed.set()
        for pending in self._pending.values():
            if not pending.outcome.done():
                pending.outcome.set_result(self.failure)
        if self._row is not None and not self._row.outcome.done():
            self._row.outcome.set_result(self.failure)

    def _stuck(self, request: StepRequest) -> Hop:
        """Heartbeats tell how far the step came: the first hop that lacks it holds it up."""
        end = request.start + len(request.tokens)
        return next((hop for hop in self._hops if hop.position < end), self._hops[-1])

    def _nonsense(self, cause: Exception) -> None:
        place = self._hops[-1].place
        first, last = place.layers
        error = ProtocolError(
            f"peer {place.peer_id} (layers {first}:{last}) sent logits that make no sense ({cause}); "
            "try again: another peer may serve these layers",
            place.peer_id,
            place.layers,
        )
        self._note(Trouble(place, error, lost=True))

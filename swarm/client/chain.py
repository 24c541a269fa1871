"""A session over a chain: one control stream per hop, a data stream to the entry, steps out, answers in."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shim.types import RowSummary
from swarm.client.config import Timeouts
from swarm.client.hop import Hop, HopPlace, Network, ask, connect, now_us, peer_failed, unexpected
from swarm.client.row import BadRow, checked_row, checked_summary
from swarm.client.sampler import TOP_LOGITS
from swarm.client.trace import StepTrace, TracedHop, trace_step
from swarm.errors import PeerFailed, ProtocolError, SwarmError
from swarm.ids import ArtifactId, SessionId
from swarm.protocol import DATA_STREAM, FrameStream, PartJoiner, StreamClosed, WireError, pb, to_swarm_error

logger = logging.getLogger(__name__)

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
class WantedRow:
    """What the exit shall return of a step's last row: its top logits, those of ``ids``, and the weight of the rest."""

    temperature: float = 1.0
    ids: tuple[int, ...] = ()
    top: int = TOP_LOGITS


@dataclass(frozen=True)
class StepRequest:
    """``tokens`` from position ``start`` on. ``row`` None: the answer is only an acknowledgement."""

    start: int
    tokens: Sequence[int]
    kind: pb.StepKind.ValueType
    row: WantedRow | None = None


@dataclass(frozen=True)
class StepAnswer:
    """``row`` is there when the request asked for it."""

    row: RowSummary | None
    numerics_id: str
    trace: StepTrace


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
    """An open session. Use it as a context manager: leaving it, or cancelling inside, frees the slot of every hop.

    Steps may be in flight together; answers come in order. The first failure of any hop ends everything: every call
    from then on raises it. (A recovery would put other hops in place of the failed ones under a higher epoch.)
    """

    def __init__(
        self, terms: SessionTerms, session_id: SessionId, hops: Sequence[Hop], data: FrameStream, timeouts: Timeouts
    ) -> None:
        self.terms = terms
        self.session_id = session_id
        self.epoch = FIRST_EPOCH
        self.failure: SwarmError | None = None
        self._hops = list(hops)
        self._data = data
        self._timeouts = timeouts
        self._last_step = 0
        self._pending: dict[int, _Pending] = {}
        self._row: _RowFetch | None = None
        self._runner = asyncio.create_task(self._run(), name="chain session")

    @classmethod
    async def open(
        cls, network: Network, places: Sequence[HopPlace], terms: SessionTerms, timeouts: Timeouts
    ) -> ChainSession:
        """Opens every hop at once, then attaches to the entry. When one refuses, the others are freed again.

        Raises PeerFailed (NodeFull, IncompatiblePeer, ProtocolError) or another SwarmError that a hop answered with.
        """
        session_id = SessionId(secrets.token_bytes(16))
        hops = await _open_hops(network, places, terms, session_id, timeouts)
        try:
            data = await _attach(network, places[0], session_id, timeouts)
        except BaseException:
            await _close_hops(hops, session_id)
            raise
        return cls(terms, session_id, hops, data, timeouts)

    async def __aenter__(self) -> ChainSession:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Frees the slots. Safe to call again."""
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)
        self._fail(SwarmError("the session is closed; open a new one"))
        await asyncio.gather(self._data.close(), _close_hops(self._hops, self.session_id))

    @property
    def places(self) -> tuple[HopPlace, ...]:
        return tuple(hop.place for hop in self._hops)

    @property
    def numerics_ids(self) -> tuple[str, ...]:
        """Of each hop, as it said when it was opened."""
        return tuple(hop.numerics_id for hop in self._hops)

    async def send(self, request: StepRequest) -> int:
        """Sends a step and returns its number for ``answer``. Waits only while the transport is full."""
        self._check()
        self._last_step += 1
        number = self._last_step
        step = self._wire_step(number, request)
        self._pending[number] = _Pending(request, now_us())
        entry = self._hops[0].place
        try:
            async with asyncio.timeout(self._timeouts.step_seconds):
                await self._data.send_step(step)
        except (StreamClosed, TimeoutError) as error:
            what = "takes no steps" if isinstance(error, TimeoutError) else "closed the connection"
            self._fail(peer_failed(entry, what))
            self._check()
        return number

    async def answer(self, number: int) -> StepAnswer:
        """Waits for the answer to one step, each may be taken once. Raises the session's failure."""
        pending = self._pending[number]
        try:
            async with asyncio.timeout(self._timeouts.step_seconds):
                outcome = await asyncio.shield(pending.outcome)
        except TimeoutError:
            self._fail(self._stuck(pending.request))
            self._check()
            raise
        finally:
            self._pending.pop(number, None)
        if isinstance(outcome, SwarmError):
            raise outcome
        return outcome

    async def step(self, request: StepRequest) -> StepAnswer:
        return await self.answer(await self.send(request))

    async def fetch_row(self, position: int) -> npt.NDArray[np.float32]:
        """The whole logits row of the last wanted ``position``; the exit keeps it until its next step."""
        self._check()
        exit_hop = self._hops[-1]
        fetch = _RowFetch(position, PartJoiner(4 * self.terms.n_vocab))
        self._row = fetch
        try:
            await exit_hop.send(pb.RowRequest(session_id=self.session_id, position=position))
            async with asyncio.timeout(self._timeouts.step_seconds):
                outcome = await fetch.outcome
        except TimeoutError as error:
            raise peer_failed(exit_hop.place, "did not send the logits row asked for") from error
        finally:
            self._row = None
        if isinstance(outcome, SwarmError):
            raise outcome
        try:
            return checked_row(outcome, self.terms.n_vocab)
        except BadRow as error:
            raise self._nonsense(error) from error

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
            self._fail(self._nonsense(error))

    def on_row(self, row: pb.Row) -> None:
        fetch = self._row
        if fetch is None or row.position != fetch.position or fetch.outcome.done():
            return
        try:
            data = fetch.joiner.add(row)
        except WireError as error:
            self._fail(self._nonsense(error))
            return
        if data is not None:
            fetch.outcome.set_result(data)

    def on_link_failed(self, hop: Hop, failed: pb.LinkFailed) -> None:
        if failed.epoch != self.epoch:
            return
        place = next((other.place for other in self._hops if other.place.peer_id == failed.successor), hop.place)
        cause = to_swarm_error(StreamClosed(failed.cause), hop.place.peer_id, hop.place.layers)
        logger.debug("link failed: %s", cause)
        self._fail(peer_failed(place, f"can't be reached from peer {hop.place.peer_id}"))

    def on_failure(self, hop: Hop, error: SwarmError) -> None:
        logger.debug("hop %d failed: %s", hop.place.index, error)
        self._fail(error)

    # --- inside

    async def _run(self) -> None:
        """Owns the reader and the heartbeat of every hop; they report failures, and end when this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for hop in self._hops:
                tasks.create_task(hop.read(self))
                tasks.create_task(hop.keep_alive(self, self._timeouts))
            tasks.create_task(self._read_data())

    async def _read_data(self) -> None:
        """The entry says nothing here unless something is wrong."""
        entry = self._hops[0].place
        try:
            body = await self._data.receive()
        except (StreamClosed, WireError) as error:
            self._fail(to_swarm_error(error, entry.peer_id, entry.layers))
            return
        if isinstance(body, pb.Error):
            self._fail(to_swarm_error(body, entry.peer_id, entry.layers))
        else:
            self._fail(peer_failed(entry, "closed the connection") if body is None else unexpected(entry, body))

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

    def _fail(self, error: SwarmError) -> None:
        if self.failure is None:
            self.failure = error
        for pending in self._pending.values():
            if not pending.outcome.done():
                pending.outcome.set_result(self.failure)
        if self._row is not None and not self._row.outcome.done():
            self._row.outcome.set_result(self.failure)

    def _stuck(self, request: StepRequest) -> PeerFailed:
        """Heartbeats tell how far the step came: the first hop that lacks it holds it up."""
        end = request.start + len(request.tokens)
        hop = next((hop for hop in self._hops if hop.position < end), self._hops[-1])
        return peer_failed(hop.place, f"did not finish a step within {self._timeouts.step_seconds:g} s")

    def _nonsense(self, error: Exception) -> ProtocolError:
        place = self._hops[-1].place
        first, last = place.layers
        return ProtocolError(
            f"peer {place.peer_id} (layers {first}:{last}) sent logits that make no sense ({error}); "
            "try again: another peer may serve these layers",
            place.peer_id,
            place.layers,
        )


async def _open_hops(
    network: Network, places: Sequence[HopPlace], terms: SessionTerms, session_id: SessionId, timeouts: Timeouts
) -> list[Hop]:
    hops: list[Hop] = []
    messages = _open_messages(network.peer_id, places, terms, session_id)

    async def open_one(place: HopPlace, message: pb.Open) -> None:
        hops.append(await Hop.open(network, place, message, timeouts))

    try:
        async with asyncio.TaskGroup() as tasks:
            for place, message in zip(places, messages, strict=True):
                tasks.create_task(open_one(place, message))
    except BaseExceptionGroup as group:
        await _close_hops(hops, session_id)
        raise _first_error(group) from None
    except BaseException:
        await _close_hops(hops, session_id)
        raise
    return sorted(hops, key=lambda hop: hop.place.index)


def _open_messages(
    own_id: str, places: Sequence[HopPlace], terms: SessionTerms, session_id: SessionId
) -> list[pb.Open]:
    neighbours = [pb.Neighbour(peer_id=own_id), *(place.neighbour() for place in places), None]
    return [
        pb.Open(
            session_id=session_id,
            epoch=FIRST_EPOCH,
            artifact_id=terms.artifact_id,
            run=pb.Layers(first=place.layers[0], last=place.layers[1]),
            context_tokens=terms.context_tokens,
            chunk_tokens=terms.chunk_tokens,
            encoding=pb.F32_LE,
            predecessor=neighbours[index],
            successor=neighbours[index + 2],
            numerics_id=terms.numerics_id,
            hop_index=index,
            purpose=terms.purpose,
        )
        for index, place in enumerate(places)
    ]


async def _attach(network: Network, entry: HopPlace, session_id: SessionId, timeouts: Timeouts) -> FrameStream:
    data = await connect(network, entry, DATA_STREAM, timeouts.connect_seconds)
    try:
        attach = pb.Attach(session_id=session_id, epoch=FIRST_EPOCH)
        answer = await ask(data, entry, attach, timeouts.open_seconds)
        if not isinstance(answer, pb.Attached):
            raise unexpected(entry, answer)
    except BaseException:
        await data.close()
        raise
    return data


async def _close_hops(hops: Sequence[Hop], session_id: SessionId) -> None:
    await asyncio.gather(*(hop.close(session_id) for hop in hops))


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

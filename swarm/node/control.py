"""Control streams: a client opens a session, learns its answers, and ends it; the handler lives as long as it does."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from dht.record import NodeState
from shim.errors import EngineError
from swarm.ids import PeerId, SessionId
from swarm.node.copies import Copies
from swarm.node.fork import fork
from swarm.node.gate import first_frame, unexpected
from swarm.node.live import LiveSession
from swarm.node.passing import AnswerPasser, PushPasser
from swarm.node.sessions import Neighbour, Route, Terms
from swarm.node.shared import Shared, clock_us
from swarm.protocol import FrameStream, StreamClosed, WireError, error_frame, pb, row_parts

logger = logging.getLogger(__name__)


class _Over(Exception):
    """Ends the conversation; ``reason`` is the last word to the client."""

    def __init__(self, reason: WireError | None) -> None:
        super().__init__()
        self.reason = reason


class ControlHandler:
    """Serves ``glm-swarm/1/control``. When the stream ends, for whatever reason, the session is freed at once."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def __call__(self, peer: PeerId, stream: FrameStream) -> None:
        opening = await first_frame(stream, self._shared.timeouts.first_frame_seconds)
        if not isinstance(opening, pb.Open):
            raise unexpected(opening)
        live = self._open(peer, opening)
        try:
            if opening.fork_of:
                await fork(self._shared, live, SessionId(opening.fork_of), opening.fork_tokens)
            await stream.send(self._opened(live))
            await Conversation(self._shared, live, stream).run()
        finally:
            self._shared.end(live)

    def _opened(self, live: LiveSession) -> pb.Opened:
        session = live.session
        return pb.Opened(
            epoch=session.epoch,
            slot_tokens=session.slot_tokens,
            numerics_id=self._shared.host.info.numerics_id,
            position=session.position,
            clock_us=clock_us(),
        )

    def _open(self, peer: PeerId, opening: pb.Open) -> LiveSession:
        self._shared.rates.opens.take(peer)
        self._check_state()
        self._check_artifact(opening)
        self._check_range(opening)
        session_id = SessionId(opening.session_id)
        strikes = self._shared.host.strikes
        if strikes.refuses(session_id):
            raise WireError(pb.SESSION_POISONED, "the session's steps have ended engines here")
        self._replace_older(peer, session_id, opening.epoch)
        source = self._shared.lives.get(SessionId(opening.fork_of))
        if source is not None and source.session.owner == peer:
            source.touch()  # it must not give way to its own fork
        primary = PeerId(opening.understudy_of.peer_id) if opening.HasField("understudy_of") else None
        suspect = opening.suspect or strikes.suspects(session_id)
        return self._shared.open(session_id, peer, _terms(opening, suspect=suspect), _route(opening), primary)

    def _check_state(self) -> None:
        state = self._shared.state
        if state == NodeState.DRAINING:
            raise self._shared.leaves()
        if state != NodeState.ONLINE or not self._shared.host.ready:
            raise WireError(pb.NOT_READY, "the engine is being loaded", retry_after_seconds=2.0)

    def _check_artifact(self, opening: pb.Open) -> None:
        ours, numerics = self._shared.manifest.artifact_id, self._shared.host.info.numerics_id
        if opening.artifact_id != ours:
            raise WireError(pb.WRONG_ARTIFACT, "another artifact is served here", theirs=opening.artifact_id, ours=ours)
        if opening.numerics_id and opening.numerics_id != numerics:
            raise WireError(
                pb.NUMERICS_MISMATCH, "results would have other bits", theirs=opening.numerics_id, ours=numerics
            )

    def _check_range(self, opening: pb.Open) -> None:
        manifest, (first, last) = self._shared.manifest, self._shared.span
        run = (opening.run.first, opening.run.last)
        if not (first <= run[0] < run[1] <= last and set(run) <= set(manifest.cuts)):
            raise WireError(pb.ILLEGAL_RANGE, f"{run[0]}:{run[1]} is no legal part of the span {first}:{last}")
        if opening.HasField("successor") == (run[1] == manifest.n_layers):
            raise WireError(pb.ILLEGAL_RANGE, "every hop but the one with the last layer has a successor")
        if opening.chunk_tokens > self._shared.host.info.chunk_tokens:
            raise WireError(pb.TOO_LARGE, f"chunks have at most {self._shared.host.info.chunk_tokens} tokens here")

    def _replace_older(self, peer: PeerId, session_id: SessionId, epoch: int) -> None:
        """The opener comes back under a higher epoch before its lost stream was noticed here."""
        older = self._shared.lives.get(session_id)
        if older is not None and older.session.owner == peer and epoch > older.session.epoch:
            self._shared.end(older, WireError(pb.STALE_EPOCH, "the session was opened anew"))


class Conversation:
    """One client, one session. ``run`` returns when the client has closed, and raises WireError with the last word."""

    def __init__(self, shared: Shared, live: LiveSession, stream: FrameStream) -> None:
        self._shared = shared
        self._live = live
        self._stream = stream
        self._group = asyncio.TaskGroup()
        self._copies = Copies(shared, live, stream, self._group)
        self._passing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        session = self._live.session
        logger.info("session of %s opens: layers %d:%d", session.owner, *session.terms.run)
        try:
            await self._converse()
        finally:
            logger.info("session of %s is over at %d tokens", session.owner, session.position)

    async def _converse(self) -> None:
        try:
            async with self._group:
                self._group.create_task(self._watch_client())
                self._group.create_task(self._watch_end())
                self._group.create_task(self._watch_draining())
                self._start_passing()
                await self._read()
                raise _Over(None)
        except* _Over as over:
            reason = _reason(over)
        except* StreamClosed:
            reason = None
        if reason is not None:
            raise reason

    async def _watch_client(self) -> None:
        seconds = self._shared.timeouts.session_seconds
        rest = seconds
        while rest > 0:
            await asyncio.sleep(rest)
            rest = self._stream.last_received + seconds - time.monotonic()
        logger.info("session of %s ends: its client is silent for %.0f s", self._live.session.owner, seconds)
        raise _Over(WireError(pb.UNKNOWN_SESSION, f"nothing was heard of the client for {seconds:g} s"))

    async def _watch_end(self) -> None:
        raise _Over(await asyncio.shield(self._live.ended))

    async def _watch_draining(self) -> None:
        await self._shared.draining.wait()
        seconds = self._shared.draining_seconds
        await self._stream.send(pb.Draining(session_id=self._live.session.id, seconds=seconds))

    # --- what the client says

    async def _read(self) -> None:
        while True:
            try:
                received = await self._stream.receive()
            except WireError as error:
                raise _Over(error) from error
            if received is None:
                return
            if not isinstance(received, pb.Ping):
                self._check_session(received)
            match received:
                case pb.Ping():
                    await self._pong(received)
                case pb.RowRequest():
                    await self._row(received)
                case pb.Reroute():
                    await self._reroute(received)
                case pb.CopyState():
                    await self._copies.order(received)
                case pb.Close():
                    await self._stream.send(pb.Closed())
                    return
                case _:
                    raise _Over(unexpected(received))

    def _check_session(self, received: object) -> None:
        if getattr(received, "session_id", b"") != self._live.session.id:
            self._shared.counters["intruders"] += 1
            raise _Over(WireError(pb.NOT_ALLOWED, "this stream belongs to another session"))

    async def _pong(self, ping: pb.Ping) -> None:
        position, queue = self._live.session.position, self._shared.queue
        await self._stream.send(pb.Pong(nonce=ping.nonce, clock_us=clock_us(), position=position, queue=queue))

    async def _row(self, request: pb.RowRequest) -> None:
        session = self._live.session
        if session.last_row is None or session.last_row != request.position:
            await self._refuse(WireError(pb.GAP, f"no row of position {request.position} is kept"))
            return
        try:
            self._shared.rates.rows.take(session.owner)
            row = await self._shared.host.row(session.slot)
        except WireError as refusal:
            await self._refuse(refusal)
            return
        except EngineError as error:
            await self._refuse(WireError(pb.INTERNAL, f"the row can't be read: {error}"))
            return
        for part in row_parts(request.position, row.astype("<f4", copy=False).tobytes()):
            await self._stream.send(part)

    async def _reroute(self, reroute: pb.Reroute) -> None:
        session = self._live.session
        try:
            if reroute.HasField("successor") == self._live.is_exit:
                raise WireError(pb.ILLEGAL_RANGE, "every hop but the one with the last layer has a successor")
            session.reroute(_route(reroute))
        except WireError as refusal:
            await self._refuse(refusal)
            return
        self._shared.detach(self._live)
        self._shared.unfeed(self._live, WireError(pb.NOT_ALLOWED, "the understudy has taken its place in the chain"))
        if not self._live.is_exit:  # its client stays the same
            await self._stop_passing()
        await self._live.settle(reroute.keep_tokens)
        session.suspect |= reroute.suspect
        await self._say_rerouted(reroute)
        if not self._live.is_exit:
            self._start_passing()

    async def _say_rerouted(self, reroute: pb.Reroute) -> None:
        session, journal = self._live.session, self._live.journal
        position = session.position
        if reroute.push_journal and not self._live.covers(reroute.successor_position):
            session.route = replace(session.route, push_journal=False)
            text = f"no journal of positions {reroute.successor_position} to {position} is kept"
            await self._refuse(WireError(pb.JOURNAL_MISSING, text, position=position))
            return
        first = position if journal is None else journal.first
        await self._stream.send(pb.Rerouted(epoch=session.epoch, position=position, journal_first=first))

    async def _refuse(self, refusal: WireError, step: int = 0) -> None:
        self._shared.counters[pb.ErrorCode.Name(refusal.code).lower()] += 1
        await self._stream.send(error_frame(refusal, session_id=self._live.session.id, step=step))

    # --- what leaves the hop

    async def _stop_passing(self) -> None:
        """A sender may hang on a successor that is gone; what it holds belongs to the epoch before."""
        if self._passing is not None:
            self._passing.cancel()
            await asyncio.wait([self._passing])

    def _start_passing(self) -> None:
        self._passing = self._group.create_task(self._pass_on())

    async def _pass_on(self) -> None:
        if self._live.is_exit:
            await AnswerPasser(self._live, self._stream, self._shared.host.info.numerics_id).run()
        else:
            await PushPasser(self._live, self._stream, self._shared.dialer, self._shared.timeouts).run()


def _terms(opening: pb.Open, *, suspect: bool) -> Terms:
    return Terms(
        run=(opening.run.first, opening.run.last),
        context_tokens=opening.context_tokens,
        chunk_tokens=opening.chunk_tokens,
        encoding=opening.encoding,
        keep_journal=opening.keep_journal,
        purpose=opening.purpose,
        suspect=suspect,
    )


def _route(message: pb.Open | pb.Reroute) -> Route:
    successor = _neighbour(message.successor) if message.HasField("successor") else None
    push = message.push_journal if isinstance(message, pb.Reroute) else False
    return Route(
        epoch=message.epoch,
        predecessor=_neighbour(message.predecessor),
        successor=successor,
        hop_index=message.hop_index,
        successor_position=message.successor_position,
        push_journal=push,
    )


def _neighbour(neighbour: pb.Neighbour) -> Neighbour:
    return Neighbour(PeerId(neighbour.peer_id), tuple(neighbour.addresses))


def _reason(over: BaseExceptionGroup[_Over]) -> WireError | None:
    first = over.exceptions[0]
    return _reason(first) if isinstance(first, BaseExceptionGroup) else first.reason

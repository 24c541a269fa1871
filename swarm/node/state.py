"""State streams: a hop feeds an understudy with what it holds of a session."""

from __future__ import annotations

from shim.errors import EngineDied, EngineError
from swarm.ids import PeerId, SessionId
from swarm.node.beat import beating
from swarm.node.data import BYTES_PER_VALUE
from swarm.node.gate import first_frame, unexpected
from swarm.node.live import LiveSession
from swarm.node.shared import Shared, clock_us, engine_lost
from swarm.node.understudy import Understudy
from swarm.protocol import FrameStream, ReceivedStep, WireError, pb


class StateHandler:
    """Serves ``glm-swarm/1/state``. Only the peer whose understudy the client opened may write, and only until the
    understudy takes its place. Whatever is wrong costs the stream; the session keeps what was written before."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def __call__(self, peer: PeerId, stream: FrameStream) -> None:
        offer = await first_frame(stream, self._shared.timeouts.first_frame_seconds)
        if not isinstance(offer, pb.StateOffer):
            self._shared.counters["intruders"] += 1
            raise unexpected(offer)
        if self._shared.draining.is_set():
            raise self._shared.leaves()
        live, understudy = self._understudy(peer, offer)
        self._check(live, offer)
        self._shared.feed(live, stream)
        try:
            async with beating(stream, self._shared.timeouts.beat_seconds):
                await Intake(self._shared, live, understudy, stream, offer).run()
        finally:
            if understudy.stream is stream:
                understudy.stream = None

    def _understudy(self, peer: PeerId, offer: pb.StateOffer) -> tuple[LiveSession, Understudy]:
        live = self._shared.lives.get(SessionId(offer.session_id))
        if live is None:
            raise WireError(pb.UNKNOWN_SESSION, "no such session is open here")
        understudy = live.understudy
        if understudy is None or understudy.primary != peer:
            self._shared.counters["intruders"] += 1
            raise WireError(pb.NOT_ALLOWED, "the session is no understudy of this peer")
        return live, understudy

    def _check(self, live: LiveSession, offer: pb.StateOffer) -> None:
        ours, numerics = self._shared.manifest.artifact_id, self._shared.host.info.numerics_id
        if offer.artifact_id != ours:
            raise WireError(pb.WRONG_ARTIFACT, "another artifact is served here", theirs=offer.artifact_id, ours=ours)
        if offer.numerics_id != numerics:
            text = "these rows mean something else here"
            raise WireError(pb.NUMERICS_MISMATCH, text, theirs=offer.numerics_id, ours=numerics)
        first, last = live.session.terms.run
        if not (offer.run.first <= first and last <= offer.run.last):
            text = f"layers {first}:{last} are needed, {offer.run.first}:{offer.run.last} are offered"
            raise WireError(pb.ILLEGAL_RANGE, text)


class Intake:
    """One state stream. ``run`` returns when it has ended, and raises WireError with the last word to the primary."""

    def __init__(
        self, shared: Shared, live: LiveSession, understudy: Understudy, stream: FrameStream, offer: pb.StateOffer
    ) -> None:
        self._shared = shared
        self._live = live
        self._understudy = understudy
        self._stream = stream
        self._offered = (offer.run.first, offer.run.last)
        self._told = (0, 0)

    async def run(self) -> None:
        session = self._live.session
        self._stream.max_step_bytes = session.terms.chunk_tokens * self._shared.manifest.n_embd * BYTES_PER_VALUE
        await self._stream.send(pb.StateAccepted(position=session.position))
        while (received := await self._stream.receive()) is not None:
            match received:
                case pb.KvRows():
                    await self._write(received)
                case ReceivedStep():
                    self._record(received)
                case pb.Ping():
                    await self._tell()
                    await self._stream.send(
                        pb.Pong(nonce=received.nonce, clock_us=clock_us(), position=session.position)
                    )
                case _:
                    self._shared.counters["intruders"] += 1
                    raise unexpected(received)
            if self._grown():
                await self._tell()

    # --- rows

    async def _write(self, rows: pb.KvRows) -> None:
        if not self._offered[0] <= rows.layer < self._offered[1]:
            raise WireError(pb.ILLEGAL_RANGE, f"layer {rows.layer} was not offered")
        if not self._understudy.holds(rows.layer):
            return
        await self._check_sizes(rows)
        async with self._understudy.turn():
            self._check_place(rows)
            if self._live.journal is not None:
                self._live.journal.truncate(rows.first)  # it tells of what is replaced now
            await self._put(rows)

    async def _check_sizes(self, rows: pb.KvRows) -> None:
        try:
            ours = await self._shared.host.kv_row_bytes(rows.layer)
        except EngineDied as died:
            raise engine_lost(str(died), blamed=False) from died
        theirs = (rows.key_bytes, rows.value_bytes, rows.indexer_bytes)
        if theirs != (ours.keys, ours.values, ours.indexer_keys):
            text = f"rows of layer {rows.layer} have {ours.keys}, {ours.values} and {ours.indexer_keys} bytes here"
            raise WireError(pb.MALFORMED, text)

    def _check_place(self, rows: pb.KvRows) -> None:
        """Nothing is awaited from here to the engine's call: the slot may be another session's a moment later."""
        session = self._live.session
        if self._live.closed or self._understudy.over or self._understudy.stream is not self._stream:
            raise WireError(pb.NOT_ALLOWED, "the understudy takes nothing from this stream any more")
        if rows.first + rows.count > session.terms.context_tokens:
            text = f"position {rows.first + rows.count} is beyond the session's {session.terms.context_tokens} tokens"
            raise WireError(pb.CONTEXT_FULL, text, position=session.position)
        held = self._understudy.held(rows.layer)
        if rows.first > held:
            text = f"the rows start at {rows.first}, but layer {rows.layer} holds {held}"
            raise WireError(pb.GAP, text, position=session.position)

    async def _put(self, rows: pb.KvRows) -> None:
        session, end = self._live.session, rows.first + rows.count
        try:
            with self._understudy.writing(rows.layer, rows.first, end):
                await self._shared.host.kv_write(session.id, session.slot, rows.layer, rows.first, rows.data)
        except EngineDied as died:
            raise engine_lost(str(died), blamed=False) from died
        except EngineError as error:
            raise WireError(pb.MALFORMED, f"the engine refuses the rows: {error}") from error

    # --- journal

    def _record(self, received: ReceivedStep) -> None:
        """What the primary gave its successor. A journal that is not kept here is missing later, no more."""
        step, terms, hidden = received.step, self._live.session.terms, received.activations
        if step.session_id != self._live.session.id or not step.replay:
            self._shared.counters["intruders"] += 1
            raise WireError(pb.NOT_ALLOWED, "only what the session's journal holds is taken here")
        if hidden is None or hidden.shape[1] != self._shared.manifest.n_embd:
            raise WireError(pb.MALFORMED, f"a journal holds hidden states of {self._shared.manifest.n_embd} values")
        if step.n_tokens > terms.chunk_tokens or step.start + step.n_tokens > terms.context_tokens:
            raise WireError(pb.TOO_LARGE, "the step is longer than the session allows")
        if self._understudy.over or self._understudy.stream is not self._stream:
            raise WireError(pb.NOT_ALLOWED, "the understudy takes nothing from this stream any more")
        # the rows after the last layer of another run are not what this run gives to its successor
        if self._live.journal is not None and self._offered[1] == terms.run[1]:
            self._live.journal.record(step.start, hidden, chunk=step.kind == pb.PREFILL)

    # --- what the primary is told

    def _state(self) -> tuple[int, int]:
        journal = self._live.journal
        return self._live.session.position, 0 if journal is None else journal.end

    def _grown(self) -> bool:
        position, journal_end = self._state()
        return position > self._told[0] or journal_end > self._told[1]

    async def _tell(self) -> None:
        self._live.touch()
        self._told = self._state()
        position = self._live.session.position
        await self._stream.send(pb.StateHeld(position=position, journal_first=self._live.journal_first))

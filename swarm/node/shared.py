"""What the stream handlers of one node have in common."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dht.record import LinkRtt, NodeState, SlotClass
from shim.errors import EngineError
from swarm.artifact.manifest import Manifest
from swarm.ids import PeerId, SessionId
from swarm.node.config import Limits, Timeouts
from swarm.node.engine_host import EngineHost
from swarm.node.journal import JournalStore
from swarm.node.live import Job, LiveSession
from swarm.node.load import Load
from swarm.node.own_digests import OwnDigests, SpanDigests
from swarm.node.rates import Rates
from swarm.node.scheduler import Runner
from swarm.node.sessions import Route, Session, SessionTable, Terms
from swarm.node.speed import Speed
from swarm.node.tally import Tally
from swarm.node.understudy import Understudy
from swarm.node.unused import told, unused
from swarm.protocol import FrameStream, WireError, pb
from swarm.protocol.questions import Dialer

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Shared:
    """State of the node towards its peers. Everything here runs in one event loop."""

    manifest: Manifest
    span: tuple[int, int]
    host: EngineHost
    table: SessionTable
    journals: JournalStore
    runner: Runner[Job]
    dialer: Dialer
    tasks: asyncio.TaskGroup  # for what outlives a handler
    limits: Limits
    timeouts: Timeouts
    chunk_tokens: int
    public_name: str = ""
    digests: OwnDigests | None = None
    state: NodeState = NodeState.JOINING
    links: tuple[LinkRtt, ...] = ()  # to likely neighbours
    tally: Tally = field(default_factory=Tally)
    lives: dict[SessionId, LiveSession] = field(default_factory=dict)
    on_change: Callable[[], None] = lambda: None  # what is announced differs now
    say: Callable[[str], None] = lambda _line: None  # to the operator
    copies: int = 0  # sessions' states under way to understudies
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    rates: Rates = field(init=False)
    load: Load = field(init=False)
    _leaves_at: float = 0.0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.rates = Rates.of(self.limits)
        self.load = Load(self.limits)

    @property
    def counters(self) -> Counter[str]:
        return self.tally.failures

    @property
    def is_exit(self) -> bool:
        return self.span[1] == self.manifest.n_layers

    @property
    def span_digests(self) -> SpanDigests | None:
        """Of what the engine has loaded; None while it is not known whole."""
        info = self.host.info_or_none
        if self.digests is None or info is None:
            return None
        return self.digests.of_span(*self.span, mtp=info.n_mtp > 0)

    @property
    def speed(self) -> Speed:
        """As announced."""
        return self.tally.speed.now(self.span[1] - self.span[0])

    @property
    def queue(self) -> int:
        """Steps and calls waiting for the engine."""
        return self.runner.waiting + self.runner.in_flight

    def drain(self, seconds: float) -> None:
        """Takes nothing new. Every client hears of it, those of understudies as the last word."""
        self._leaves_at = time.monotonic() + seconds
        self.state = NodeState.DRAINING
        self.draining.set()
        for live in tuple(self.lives.values()):
            if live.understudy is not None:
                self.end(live, self.leaves())
        self.on_change()

    @property
    def draining_seconds(self) -> float:
        """What is left of the time to leave."""
        return max(0.0, self._leaves_at - time.monotonic())

    def leaves(self) -> WireError:
        return WireError(pb.NODE_DRAINING, "the node takes nothing new")

    def open(
        self, session_id: SessionId, owner: PeerId, terms: Terms, route: Route, primary: PeerId | None = None
    ) -> LiveSession:
        """Books the session, an understudy of ``primary`` if one is given. Raises WireError. The caller ends it with
        ``end``."""
        session = self._booked(session_id, owner, terms, route, understudy=primary is not None)
        live = LiveSession(
            session=session,
            runner=self.runner,
            shape=(self.manifest.n_layers, self.manifest.n_embd, self.manifest.n_vocab),
            context=self.table.slots.context(session.slot),
            tally=self.tally,
            load=self.load,
            journal=self.journals.open() if terms.keep_journal and terms.run[1] < self.manifest.n_layers else None,
            understudy=None if primary is None else Understudy(session, primary),
        )
        self.lives[session_id] = live
        self.tally.sessions += 1
        self.on_change()
        return live

    def slots(self) -> tuple[SlotClass, ...]:
        """As announced: one that is booked by an unused session is there for whoever asks."""
        lives = unused(self.lives.values(), self.timeouts.idle_seconds, time.monotonic())
        return self.table.slots.classes([live.session.slot for live in lives])

    def end_unused(self) -> None:
        """Sessions that nobody has used for very long, whether or not their slots are needed."""
        now = time.monotonic()
        for live in unused(self.lives.values(), self.timeouts.longest_idle_seconds, now):
            self.tally.unused["too_long"] += 1
            self.end(live, told(live.idle_since, now, "no session may do that"))

    def _booked(self, session_id: SessionId, owner: PeerId, terms: Terms, route: Route, *, understudy: bool) -> Session:
        try:
            return self.table.open(session_id, owner, terms, route)
        except WireError as refusal:
            if refusal.code != pb.NODE_FULL or understudy or not self._make_room(terms.context_tokens):
                raise
        return self.table.open(session_id, owner, terms, route)

    def _make_room(self, context_tokens: int) -> bool:
        now = time.monotonic()
        for live in unused(self.lives.values(), self.timeouts.idle_seconds, now):
            if live.session.slot_tokens >= context_tokens:
                self.tally.unused["slot_needed"] += 1
                self.end(live, told(live.idle_since, now, "another one needed its slot"))
                return True
        return False

    def end(self, live: LiveSession, reason: WireError | None = None) -> None:
        """Frees everything at once, also with a step under way: its result is dropped. Idempotent."""
        if live.closed:
            return
        live.close(reason)
        self.detach(live)
        self.unfeed(live, reason or WireError(pb.UNKNOWN_SESSION, "the session has ended"))
        session = live.session
        self.table.close(session)
        del self.lives[session.id]
        self.tasks.create_task(self._empty(session.slot))
        self._ended.set()
        self.on_change()

    def end_all(self, reason: WireError) -> None:
        for live in tuple(self.lives.values()):
            self.end(live, reason)

    async def session_ended(self) -> None:
        """Returns after the next session has ended."""
        self._ended.clear()
        await self._ended.wait()

    def attach(self, live: LiveSession, data: FrameStream) -> None:
        """Makes ``data`` the predecessor's stream; one that it opened before is closed."""
        self.detach(live)
        live.data = data

    def detach(self, live: LiveSession) -> None:
        data, live.data = live.data, None
        if data is not None:
            self.tasks.create_task(data.close())

    def feed(self, live: LiveSession, stream: FrameStream) -> None:
        """Makes ``stream`` the one that feeds an understudy; one that its primary opened before is closed."""
        assert live.understudy is not None
        self.unfeed(live, WireError(pb.NOT_ALLOWED, "the primary has opened another stream"))
        live.understudy.stream = stream

    def unfeed(self, live: LiveSession, reason: WireError) -> None:
        if live.understudy is not None:
            stream, live.understudy.stream = live.understudy.stream, None
            if stream is not None:
                self.tasks.create_task(stream.refuse(reason))

    async def _empty(self, slot: int) -> None:
        # the pipe keeps the order: whoever books the slot next computes after this
        try:
            await self.host.truncate(slot, 0)
        except EngineError as error:
            logger.debug("slot %d was emptied with its engine: %s", slot, error)


def engine_lost(cause: str, *, blamed: bool = False) -> WireError:
    when = " in a step of this session" if blamed else ""
    return WireError(
        pb.ENGINE_LOST,
        f"the engine died{when} ({cause}) and the session's state with it",
        retry_after_seconds=1.0,
        blamed=blamed,
    )


def clock_us() -> int:
    return time.monotonic_ns() // 1000

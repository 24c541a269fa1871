"""The control stream to one hop: opened, read by one task, kept awake by another."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dht.errors import DhtError, PeerUnreachable
from swarm.client.config import Timeouts
from swarm.client.trace import ClockOffset
from swarm.errors import PeerFailed, SwarmError
from swarm.ids import PeerId
from swarm.protocol import CONTROL_STREAM, FrameStream, StreamClosed, WireError, pb, to_swarm_error

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
MAX_PINGS_UNANSWERED = 64
# said of one request, without a step's number, by a hop that goes on
_OF_A_REQUEST = (pb.GAP, pb.JOURNAL_MISSING, pb.LIMIT_REACHED)
# said of a step, by a hop that has ended the session for it
_LAST_WORDS = (pb.ENGINE_LOST, pb.UNKNOWN_SESSION, pb.NODE_DRAINING, pb.SESSION_POISONED)


class Network(Protocol):
    """What a session needs of the swarm's network; ``dht.peer.Peer`` has it."""

    @property
    def peer_id(self) -> str: ...

    async def open_stream(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = ()
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...


@dataclass(frozen=True)
class HopPlace:
    """One hop of a chain: who runs which layers."""

    index: int
    peer_id: PeerId
    layers: tuple[int, int]
    addresses: tuple[str, ...] = ()
    name: str = ""

    def neighbour(self) -> pb.Neighbour:
        return pb.Neighbour(peer_id=self.peer_id, addresses=self.addresses)


class HopEvents(Protocol):
    """Who is told what a hop says. Called from the hop's reader task; must not block."""

    def on_answer(self, answer: pb.Answer) -> None: ...

    def on_row(self, row: pb.Row) -> None: ...

    def on_link_failed(self, hop: Hop, failed: pb.LinkFailed) -> None: ...

    def on_refusal(self, hop: Hop, error: SwarmError) -> None:
        """The hop is there, but it could not do what it was asked for."""

    def on_failure(self, hop: Hop, error: SwarmError) -> None:
        """The hop is gone, and what it held. Told once."""


class HopWatch(Protocol):
    """Who is told what concerns the session in every epoch. As above."""

    def on_draining(self, hop: Hop) -> None:
        """Its node leaves before ``hop.draining_until``."""

    def on_copied(self, hop: Hop, copied: pb.Copied) -> None: ...


@dataclass(frozen=True)
class Rerouted:
    """What a hop answers to a new route: tokens held, and whether its journal feeds the successor."""

    position: int
    pushes: bool


class Hop:
    """An opened hop: a task of its own reads what it says and keeps it awake, from ``attend`` to ``close`` or to its
    failure. ``place`` may change its index with a new route."""

    def __init__(self, place: HopPlace, stream: FrameStream, opened: pb.Opened, clock: ClockOffset) -> None:
        self.place = place
        self.failure: SwarmError | None = None
        self.clock = clock
        self.slot_tokens = opened.slot_tokens
        self.numerics_id = opened.numerics_id
        self.position = opened.position  # tokens held, as of the last heartbeat
        self.queue = 0
        self.draining_until: float | None = None  # monotonic; None: its node stays
        self._watch: HopWatch | None = None
        self._stream = stream
        self._pings: dict[int, int] = {}
        self._nonces = itertools.count(1)
        self._events: HopEvents | None = None
        self._attending: asyncio.Task[None] | None = None
        self._rerouted: asyncio.Future[Rerouted | None] | None = None  # None: the hop has failed
        self._epoch = 0  # of the newest route
        self._routes: dict[int, int] = {}  # epochs not confirmed yet: the tokens to keep at most

    @classmethod
    async def open(cls, network: Network, place: HopPlace, message: pb.Open, timeouts: Timeouts) -> Hop:
        """Raises PeerFailed (NodeFull, IncompatiblePeer...) or what else the hop's Error stands for."""
        stream = await connect(network, place, CONTROL_STREAM, timeouts.connect_seconds)
        try:
            sent_us = now_us()
            answer = await ask(stream, place, message, timeouts.open_seconds)
            if not isinstance(answer, pb.Opened):
                raise unexpected(place, answer)
            clock = ClockOffset()
            clock.add(sent_us, answer.clock_us, now_us())
            return cls(place, stream, answer, clock)
        except BaseException:
            await stream.close()
            raise

    async def send(self, body: pb.RowRequest | pb.Ping | pb.CopyState | pb.Close) -> None:
        """Raises PeerFailed when the hop is gone."""
        try:
            await self._stream.send(body)
        except StreamClosed as error:
            raise to_swarm_error(error, self.place.peer_id, self.place.layers) from error

    @property
    def silent_seconds(self) -> float:
        """Since its last byte."""
        return time.monotonic() - self._stream.last_received

    def attend(self, events: HopEvents | None, timeouts: Timeouts) -> None:
        """Tells ``events`` from now on, or nobody. A hop that has failed stays failed, and says so to them."""
        self._events = events
        if events is not None and self.failure is not None:
            events.on_failure(self, self.failure)
        if self._attending is None:
            self._attending = asyncio.create_task(self._attend(timeouts), name="chain session")

    def watch(self, watch: HopWatch) -> None:
        """Tells ``watch`` from now on, and what it has missed."""
        self._watch = watch
        if self.draining_until is not None:
            watch.on_draining(self)

    async def reroute(self, message: pb.Reroute, seconds: float) -> Rerouted:
        """Puts an attended hop under a new epoch. Raises PeerFailed; the hop is of no more use then."""
        self._rerouted = asyncio.get_running_loop().create_future()
        self._epoch, self._routes[message.epoch] = message.epoch, message.keep_tokens
        try:
            async with asyncio.timeout(seconds):
                if self.failure is None:
                    await self._stream.send(message)
                    rerouted = await self._rerouted
                    if rerouted is not None:
                        return rerouted
        except (TimeoutError, StreamClosed) as error:
            slow = isinstance(error, TimeoutError)
            self._fail(self._failed(f"took no new route within {seconds:g} s" if slow else "closed the connection"))
        finally:
            self._rerouted = None
        assert self.failure is not None
        raise self.failure

    async def _attend(self, timeouts: Timeouts) -> None:
        reading = asyncio.create_task(self._read(), name="chain session")
        beating = asyncio.create_task(self._keep_alive(timeouts), name="chain session")
        try:
            await asyncio.wait({reading, beating}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            beating.cancel()
            await asyncio.wait({reading, beating})

    async def _read(self) -> None:
        try:
            while self.failure is None and (body := await self._stream.receive()) is not None:
                self._take(body)
        except (StreamClosed, WireError) as error:
            self._fail(to_swarm_error(error, self.place.peer_id, self.place.layers))
        else:
            self._fail(self._failed("closed the connection"))

    async def _keep_alive(self, timeouts: Timeouts) -> None:
        """Pings, and notices silence. A pause of this very program is not held against the hop."""
        interval = timeouts.heartbeat_interval_seconds
        before = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            asleep, before = now - before > 2 * interval + 1, now
            silence = self.silent_seconds
            if silence > timeouts.heartbeat_seconds and not asleep:
                return self._fail(self._failed(f"has been silent for {silence:.1f} s"))
            await self._ping(interval)

    async def close(self, session_id: bytes) -> None:
        """Ends the session in the hop, which frees its slot at once. Never raises for what the peer does."""
        self._events = self._watch = None
        if self._attending is not None:
            self._attending.cancel()
            await asyncio.wait({self._attending})
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._stream.send(pb.Close(session_id=session_id))
        except (StreamClosed, TimeoutError):
            pass
        await self._stream.close()

    async def _ping(self, seconds: float) -> None:
        nonce = next(self._nonces)
        self._pings[nonce] = now_us()
        if len(self._pings) > MAX_PINGS_UNANSWERED:
            self._pings.pop(min(self._pings))
        try:
            async with asyncio.timeout(seconds):
                await self._stream.send(pb.Ping(nonce=nonce))
        except (TimeoutError, StreamClosed):
            return  # the reader or the next look at the silence reports it

    def _take(self, body: object) -> None:
        match body:
            case pb.Pong():
                self._pong(body)
            case pb.Answer() | pb.Row() | pb.LinkFailed():
                if self._events is not None:  # else it is of an epoch that is over
                    self._tell(self._events, body)
            case pb.Rerouted():
                self._take_rerouted(body)
            case pb.Draining():
                self.draining_until = time.monotonic() + body.seconds
                if self._watch is not None:
                    self._watch.on_draining(self)
            case pb.Copied():
                if self._watch is not None:
                    self._watch.on_copied(self, body)
            case pb.Error():
                self._take_error(body)
            case pb.StepDone() | pb.Closed():
                pass
            case _:
                self._fail(unexpected(self.place, body))

    def _tell(self, events: HopEvents, body: pb.Answer | pb.Row | pb.LinkFailed) -> None:
        match body:
            case pb.Answer():
                events.on_answer(body)
            case pb.Row():
                events.on_row(body)
            case pb.LinkFailed():
                events.on_link_failed(self, body)

    def _take_error(self, body: pb.Error) -> None:
        error = to_swarm_error(body, self.place.peer_id, self.place.layers)
        if body.code == pb.JOURNAL_MISSING and self._rerouted is not None:
            # says no epoch: one that a read error of the route before has sent is taken for this one's, which costs a
            # replay; so the route is not confirmed yet
            self._answer_reroute(Rerouted(body.position, pushes=False), self._routes.get(self._epoch, 0))
        elif body.code in _LAST_WORDS or not (body.step or body.code in _OF_A_REQUEST):
            self._fail(error)
        elif self._events is not None:
            self._events.on_refusal(self, error)

    def _take_rerouted(self, body: pb.Rerouted) -> None:
        keep = self._routes.pop(body.epoch, None)
        if keep is None:
            self._fail(unexpected(self.place, body))
        elif body.epoch == self._epoch:
            self._answer_reroute(Rerouted(body.position, pushes=True), keep)

    def _answer_reroute(self, rerouted: Rerouted, keep: int) -> None:
        if rerouted.position > keep:
            what = f"it can't hold {rerouted.position} tokens of a session of {keep}"
            self._fail(to_swarm_error(WireError(pb.MALFORMED, what), self.place.peer_id, self.place.layers))
        elif self._rerouted is not None and not self._rerouted.done():
            self._rerouted.set_result(rerouted)

    def _fail(self, error: SwarmError) -> None:
        if self.failure is not None:
            return
        self.failure = error
        if self._rerouted is not None and not self._rerouted.done():
            self._rerouted.set_result(None)
        if self._events is not None:
            self._events.on_failure(self, error)

    def _pong(self, pong: pb.Pong) -> None:
        sent_us = self._pings.pop(pong.nonce, None)
        if sent_us is not None:
            self.clock.add(sent_us, pong.clock_us, now_us())
            self.position = pong.position
            self.queue = pong.queue

    def _failed(self, what: str) -> PeerFailed:
        return peer_failed(self.place, what)


async def connect(network: Network, place: HopPlace, protocol: str, seconds: float) -> FrameStream:
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await network.open_stream(place.peer_id, protocol, place.addresses)
    except TimeoutError as error:
        raise peer_failed(place, f"did not answer within {seconds:g} s") from error
    except PeerUnreachable as error:
        raise peer_failed(place, f"can't be reached ({error.reason})") from error
    except (DhtError, OSError) as error:
        raise peer_failed(place, f"can't be reached ({error})") from error
    return FrameStream(reader, writer, max_step_bytes=0)  # nodes send no steps to clients


async def ask(stream: FrameStream, place: HopPlace, message: pb.Open | pb.Attach, seconds: float) -> object:
    """The answer to ``message``; an Error is raised as what it stands for."""
    try:
        async with asyncio.timeout(seconds):
            await stream.send(message)
            answer = await stream.receive()
    except TimeoutError as error:
        raise peer_failed(place, f"did not open the session within {seconds:g} s") from error
    except (StreamClosed, WireError) as error:
        raise to_swarm_error(error, place.peer_id, place.layers) from error
    if answer is None:
        raise peer_failed(place, "closed the connection while the session was opened")
    if isinstance(answer, pb.Error):
        raise to_swarm_error(answer, place.peer_id, place.layers)
    return answer


def peer_failed(place: HopPlace, what: str) -> PeerFailed:
    first, last = place.layers
    return PeerFailed(
        f"peer {place.peer_id} (layers {first}:{last}) {what}; try again: another peer may serve these layers",
        place.peer_id,
        place.layers,
    )


def unexpected(place: HopPlace, body: object) -> SwarmError:
    error = WireError(pb.MALFORMED, f"{type(body).__name__} is out of order")
    return to_swarm_error(error, place.peer_id, place.layers)


def now_us() -> int:
    return time.monotonic_ns() // 1000

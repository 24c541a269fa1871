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

    def on_failure(self, hop: Hop, error: SwarmError) -> None: ...


class Hop:
    """An opened hop. ``read`` and ``keep_alive`` run until cancelled or until the hop fails, which they report once to
    ``HopEvents``; they never raise for what the peer does."""

    def __init__(self, place: HopPlace, stream: FrameStream, opened: pb.Opened, clock: ClockOffset) -> None:
        self.place = place
        self.clock = clock
        self.slot_tokens = opened.slot_tokens
        self.numerics_id = opened.numerics_id
        self.position = opened.position  # tokens held, as of the last heartbeat
        self.queue = 0
        self._stream = stream
        self._pings: dict[int, int] = {}
        self._nonces = itertools.count(1)

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

    async def send(self, body: pb.RowRequest | pb.Ping | pb.Close) -> None:
        """Raises PeerFailed when the hop is gone."""
        try:
            await self._stream.send(body)
        except StreamClosed as error:
            raise to_swarm_error(error, self.place.peer_id, self.place.layers) from error

    async def read(self, events: HopEvents) -> None:
        try:
            while (body := await self._stream.receive()) is not None:
                self._take(body, events)
        except (StreamClosed, WireError) as error:
            events.on_failure(self, to_swarm_error(error, self.place.peer_id, self.place.layers))
        else:
            events.on_failure(self, self._failed("closed the connection"))

    async def keep_alive(self, events: HopEvents, timeouts: Timeouts) -> None:
        """Pings, and reports silence. A pause of this very program is not held against the hop."""
        interval = timeouts.heartbeat_interval_seconds
        before = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            asleep, before = now - before > 2 * interval + 1, now
            silence = now - self._stream.last_received
            if silence > timeouts.heartbeat_seconds and not asleep:
                return events.on_failure(self, self._failed(f"has been silent for {silence:.1f} s"))
            await self._ping(interval)

    async def close(self, session_id: bytes) -> None:
        """Ends the session in the hop, which frees its slot at once. Never raises for what the peer does."""
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

    def _take(self, body: object, events: HopEvents) -> None:
        match body:
            case pb.Pong():
                self._pong(body)
            case pb.Answer():
                events.on_answer(body)
            case pb.Row():
                events.on_row(body)
            case pb.LinkFailed():
                events.on_link_failed(self, body)
            case pb.Error():
                events.on_failure(self, to_swarm_error(body, self.place.peer_id, self.place.layers))
            case pb.StepDone() | pb.Closed():
                pass
            case _:
                events.on_failure(self, unexpected(self.place, body))

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

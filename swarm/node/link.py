"""The way to another node: a stream that one side feeds, and the other answers with signs of life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from dht.errors import DhtError
from swarm.node.config import Timeouts
from swarm.node.sessions import Neighbour
from swarm.protocol import Activations, Body, FrameStream, Meter, Received, StreamClosed, WireError, clean_text, pb
from swarm.protocol.questions import Dialer


class LinkBroken(Exception):
    """The other side can't be reached, has refused, or has closed the stream."""


@dataclass(frozen=True)
class Greeting:
    """How a stream begins: ``hello`` goes out, a ``welcome`` must come back. ``who`` stands in messages."""

    protocol: str
    hello: Body
    welcome: type[Body]
    who: str


class Link:
    """Opened when it is first needed. ``watch`` tells of the other side's end, or silence, while nothing is sent.

    ``send``, ``send_step`` and ``open`` raise LinkBroken; cancelling them breaks the link. One task may use them.
    """

    def __init__(
        self, dialer: Dialer, neighbour: Neighbour, greeting: Greeting, timeouts: Timeouts, meter: Meter
    ) -> None:
        self._dialer = dialer
        self._greeting = greeting
        self._timeouts = timeouts
        self._meter = meter
        self._stream: FrameStream | None = None
        self._opened = asyncio.Event()
        self.neighbour = neighbour

    async def open(self) -> FrameStream:
        """Does nothing when it is open already."""
        if self._stream is None:
            self._stream = await self._dial()
            self._opened.set()
        return self._stream

    async def send(self, body: Body) -> None:
        stream = await self.open()
        try:
            await stream.send(body)
        except StreamClosed as closed:
            raise LinkBroken(str(closed)) from closed

    async def send_step(self, step: pb.Step, hidden: Activations, timing: pb.HopTiming | None = None) -> None:
        stream = await self.open()
        try:
            await stream.send_step(step, hidden, timing=timing)
        except StreamClosed as closed:
            raise LinkBroken(str(closed)) from closed

    async def watch(self, heard: Callable[[Received], bool] = lambda _body: False) -> LinkBroken:
        """Returns when an opened link has broken. What is no bare sign of life is given to ``heard``, and breaks the
        link unless that takes it. A pause of this very program is not held against the other side."""
        await self._opened.wait()
        assert self._stream is not None
        seconds = self._timeouts.silence_seconds
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(seconds):
                    received = await self._stream.receive()
            except TimeoutError:
                if time.monotonic() - began < seconds + 1:
                    return LinkBroken(f"{self._greeting.who} has been silent for {seconds:g} s")
                continue
            except (StreamClosed, WireError) as error:
                return LinkBroken(str(error))
            if received is None or not (heard(received) or isinstance(received, pb.Pong)):
                return LinkBroken(self._said(received))

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.close()

    async def _dial(self) -> FrameStream:
        try:
            async with asyncio.timeout(self._timeouts.connect_seconds):
                reader, writer = await self._dialer.open_stream(
                    self.neighbour.peer_id, self._greeting.protocol, self.neighbour.addresses
                )
                return await self._greeted(FrameStream(reader, writer, max_step_bytes=0, meter=self._meter))
        except TimeoutError:
            raise LinkBroken(f"no answer within {self._timeouts.connect_seconds:g} s") from None
        except (StreamClosed, WireError, DhtError, OSError) as error:
            raise LinkBroken(str(error)) from error

    async def _greeted(self, stream: FrameStream) -> FrameStream:
        welcome = False
        try:
            await stream.send(self._greeting.hello)
            received = await stream.receive()
            if not isinstance(received, self._greeting.welcome):
                raise LinkBroken(self._said(received))
            welcome = True
            return stream
        finally:
            if not welcome:
                await stream.close()

    def _said(self, received: Received | None) -> str:
        who = self._greeting.who
        if received is None:
            return f"{who} closed the stream"
        if isinstance(received, pb.Error):
            return f"{who} refused: {clean_text(received.message)}"
        return f"{who} sent an unexpected {type(received).__name__}"

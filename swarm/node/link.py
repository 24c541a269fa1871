"""The way to a session's next hop: a data stream, opened with the first step."""

from __future__ import annotations

import asyncio
import time

from dht.errors import DhtError
from swarm.node.config import Timeouts
from swarm.node.sessions import Neighbour, Session
from swarm.node.shared import Dialer
from swarm.protocol import DATA_STREAM, Activations, FrameStream, Meter, StreamClosed, WireError, clean_text, pb


class LinkBroken(Exception):
    """The successor can't be reached, has refused, or has closed the stream."""


class SuccessorLink:
    """Carries the steps of one session in one epoch. ``watch`` tells of the other side's end, or silence, while nothing
    is sent."""

    def __init__(
        self, dialer: Dialer, session: Session, successor: Neighbour, timeouts: Timeouts, meter: Meter
    ) -> None:
        self._dialer = dialer
        self._attach = pb.Attach(session_id=session.id, epoch=session.epoch)
        self._timeouts = timeouts
        self._meter = meter
        self._stream: FrameStream | None = None
        self._opened = asyncio.Event()
        self.successor = successor

    async def send(self, step: pb.Step, hidden: Activations, timing: pb.HopTiming | None = None) -> None:
        """Raises LinkBroken. Cancelling breaks the link."""
        try:
            if self._stream is None:
                self._stream = await self._open()
                self._opened.set()
            await self._stream.send_step(step, hidden, timing=timing)
        except StreamClosed as closed:
            raise LinkBroken(str(closed)) from closed

    async def watch(self) -> LinkBroken:
        """Returns when an opened link has broken. The successor says nothing but that it lives, until it is wrong. A
        pause of this very program is not held against it."""
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
                    return LinkBroken(f"the successor has been silent for {seconds:g} s")
                continue
            except (StreamClosed, WireError) as error:
                return LinkBroken(str(error))
            if not isinstance(received, pb.Pong):
                return LinkBroken(_said(received))

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.close()

    async def _open(self) -> FrameStream:
        try:
            async with asyncio.timeout(self._timeouts.connect_seconds):
                reader, writer = await self._dialer.open_stream(
                    self.successor.peer_id, DATA_STREAM, self.successor.addresses
                )
                return await self._attached(FrameStream(reader, writer, max_step_bytes=0, meter=self._meter))
        except TimeoutError:
            raise LinkBroken(f"no answer within {self._timeouts.connect_seconds:g} s") from None
        except (WireError, DhtError, OSError) as error:
            raise LinkBroken(str(error)) from error

    async def _attached(self, stream: FrameStream) -> FrameStream:
        attached = False
        try:
            await stream.send(self._attach)
            received = await stream.receive()
            if not isinstance(received, pb.Attached):
                raise LinkBroken(_said(received))
            attached = True
            return stream
        finally:
            if not attached:
                await stream.close()


def _said(received: object) -> str:
    if received is None:
        return "the successor closed the stream"
    if isinstance(received, pb.Error):
        return f"the successor refused: {clean_text(received.message)}"
    return f"the successor sent an unexpected {type(received).__name__}"

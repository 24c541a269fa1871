"""A stream of frames over an asyncio reader and writer. Timeouts belong to the caller."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeAlias

from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.activations import Activations, encode_activations
from swarm.protocol.frames import Body, check_length, decode, frame_of, timing_field
from swarm.protocol.limits import DEFAULT_MAX_STEP_BYTES, LENGTH_BYTES, MAX_UNSENT_BYTES
from swarm.protocol.meter import Meter
from swarm.protocol.steps import ReceivedStep, StepAssembler, split_step
from swarm.protocol.validate import validate
from swarm.protocol.wire_errors import StreamClosed, WireError, error_frame

logger = logging.getLogger(__name__)

Received: TypeAlias = Body | ReceivedStep

_WRITE_BYTES = 256 << 10  # handed to the transport at once
_READ_BYTES = 256 << 10
_FRAMES_IN_A_ROW = 16  # about a millisecond of small ones
_LINGER_SECONDS = 0.5  # from the last word to the end
_CLOSE_SECONDS = 1.0  # for the last bytes to leave; then the stream is cut


class FrameStream:
    """Owns ``reader`` and ``writer``. One task may receive; any number may send.

    Cancelling: ``receive`` loses nothing and can be called again. A ``send`` that has not begun sends nothing; one that
    has sent a part of a frame or step cuts the stream, because nothing sensible could follow.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_step_bytes: int = DEFAULT_MAX_STEP_BYTES,
        meter: Meter | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._assembler = StepAssembler(max_step_bytes)
        self._meter = meter or Meter()
        self._buffer = bytearray()
        self._frames_in_a_row = 0
        self._sending = asyncio.Lock()
        self._reading = asyncio.Lock()  # between the task that receives and one that refuses
        self._closing = False
        self._refusing: asyncio.Future[None] | None = None
        self._failure: WireError | None = None
        self._received_ns = time.monotonic_ns()
        self._serialise_ns = 0
        # The transport pauses writers above the high mark, and one write may come on top.
        high = MAX_UNSENT_BYTES - _WRITE_BYTES
        writer.transport.set_write_buffer_limits(high=high, low=high // 4)

    @property
    def last_received(self) -> float:
        """``time.monotonic()`` when the last byte came (of whatever frame), or the stream was made."""
        return self._received_ns / 1e9

    @property
    def max_step_bytes(self) -> int:
        """Largest payload accepted in a step; a session sets it to its chunk_tokens * width * 4."""
        return self._assembler.max_step_bytes

    @max_step_bytes.setter
    def max_step_bytes(self, n_bytes: int) -> None:
        self._assembler.max_step_bytes = n_bytes

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._closing or self._writer.is_closing()

    async def send(self, body: Body, *, timing: pb.HopTiming | None = None) -> None:
        """Hands one frame to the transport; waits while 1 MiB is unsent.

        ``timing`` (of this hop, with an Answer) is sent as the last of ``body.timings``: ``sent_us`` is filled in and
        ``serialise_us`` grows by what encoding took; both messages stay as they are.
        Raises ``StreamClosed``, and ``WireError`` for what the receiver would refuse: then nothing was sent.
        """
        began_ns = time.monotonic_ns()
        validate(body)
        data = body.SerializeToString()
        encode_ns = time.monotonic_ns() - began_ns
        async with self._sending:
            more = self._timing(body, timing, encode_ns)
            await self._write([frame_of(type(body), data, more)])

    async def send_step(
        self, step: pb.Step, activations: Activations | None = None, *, timing: pb.HopTiming | None = None
    ) -> None:
        """Sends a step with its activations (f32 [n_tokens, width]) in ``step.encoding`` (f32 when unspecified).

        ``width`` and ``payload_bytes`` are filled in; ``timing`` and errors as in ``send``; ``step`` itself stays as it
        is. The array may be reused when this returns.
        """
        began_ns = time.monotonic_ns()
        head, payload = _with_payload(step, activations)
        encode_ns = time.monotonic_ns() - began_ns
        async with self._sending:
            more = self._timing(head, timing, encode_ns)
            await self._write(split_step(head, payload, more))

    async def receive(self) -> Received | None:
        """The next body, or a whole step. None when the stream has ended between two frames, or this side closed it.

        Raises ``WireError`` for what breaks the rules (and again on every later call: pass it to ``refuse``) and
        ``StreamClosed`` when the stream ends within a frame or step, or breaks.
        """
        if self._failure is not None:
            raise self._failure
        try:
            while not self._closing and (frame := await self._read_frame()) is not None:
                received = self._take(frame)
                if received is not None:
                    return received
        except WireError as error:
            self._failure = error
            self._buffer.clear()
            raise
        except StreamClosed:
            if not self._closing:
                raise
        if self._assembler.waiting and not self._closing:
            raise StreamClosed("the stream ended within a step")
        return None

    async def refuse(self, error: Exception | pb.Error) -> None:
        """Sends the error as the last word, if the other side still takes it, and closes. Never raises."""
        message = error if isinstance(error, pb.Error) else error_frame(error)
        refusing = self._refusing = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.send(message)
            self._closing = True
            await self._linger()
        except (StreamClosed, OSError) as cause:  # a TimeoutError is an OSError
            logger.debug("the error %r did not reach the other side: %s", message.message, cause)
        finally:
            refusing.set_result(None)
            await self.close()

    async def close(self) -> None:
        """Closes the stream, at the latest a second after the last word of a ``refuse`` that another task is about.
        Safe to call again; senders get ``StreamClosed``."""
        if self._refusing is not None:
            await asyncio.wait({self._refusing})
        self._closing = True
        self._writer.close()
        # A task of its own: cancelling wait_closed() would cancel the future that every later call waits for.
        closed = asyncio.create_task(self._wait_closed())
        try:
            await asyncio.wait({closed}, timeout=_CLOSE_SECONDS)
        finally:
            self._cut()
        await closed

    async def _wait_closed(self) -> None:
        try:
            await self._writer.wait_closed()
        except OSError as cause:
            logger.debug("the stream had broken before it was closed: %r", cause)

    # --- receiving

    async def _read_frame(self) -> bytearray | None:
        # what is there already is read without waiting: a peer that floods this stream must not hold up the others
        if self._frames_in_a_row >= _FRAMES_IN_A_ROW:
            self._frames_in_a_row = 0
            await asyncio.sleep(0)
            if self._closing:
                return None
        self._frames_in_a_row += 1
        if not await self._fill(LENGTH_BYTES):
            return None
        length = check_length(int.from_bytes(self._buffer[:LENGTH_BYTES], "big"))
        await self._fill(LENGTH_BYTES + length)
        return self._cut_frame(LENGTH_BYTES + length)

    async def _fill(self, n_bytes: int) -> bool:
        """Reads until the buffer holds ``n_bytes``; False when the stream ends and the buffer is empty."""
        while len(self._buffer) < n_bytes:
            chunk = await self._read()
            if not chunk:
                if self._buffer:
                    raise StreamClosed("the stream ended within a frame")
                return False
            if self._closing:  # refuse() drops what comes, so frames are no longer whole
                raise StreamClosed("this side has closed the stream")
            self._received_ns = time.monotonic_ns()
            self._meter.received_bytes += len(chunk)
            self._buffer += chunk
        return True

    async def _read(self) -> bytes:
        try:
            async with self._reading:
                return await self._reader.read(_READ_BYTES)
        except OSError as error:
            raise StreamClosed(f"the stream broke: {error}") from error

    def _cut_frame(self, end: int) -> bytearray:
        if len(self._buffer) == end:
            frame, self._buffer = self._buffer, bytearray()
            del frame[:LENGTH_BYTES]
            return frame
        frame = self._buffer[LENGTH_BYTES:end]
        del self._buffer[:end]
        return frame

    def _take(self, frame: bytearray) -> Received | None:
        began_ns = time.monotonic_ns()
        body = decode(frame)
        if isinstance(body, pb.StepPart):
            whole = self._assembler.add(body)
        elif self._assembler.waiting:
            raise WireError(pb.MALFORMED, "another frame came between the parts of a step")
        elif isinstance(body, pb.Step):
            self._serialise_ns = 0
            whole = self._assembler.begin(body)
        else:
            return body
        self._serialise_ns += time.monotonic_ns() - began_ns
        return ReceivedStep(*whole, self._serialise_ns / 1e9, self._received_ns // 1000) if whole else None

    # --- sending

    def _timing(self, body: Body, timing: pb.HopTiming | None, encode_ns: int) -> bytes:
        if timing is None:
            return b""
        if not isinstance(body, pb.Answer | pb.Step):
            raise TypeError(f"{type(body).__name__} carries no timings")
        self._meter.encoding.observe(encode_ns / 1e9)
        return timing_field(body, timing, encode_ns)

    async def _write(self, frames: Iterable[bytes]) -> None:
        """Call with the lock held. Waits before each write, so that what has been written whole is never cut."""
        begun = done = False
        try:
            for frame in frames:
                self._meter.sent_bytes += len(frame)
                for at in range(0, len(frame), _WRITE_BYTES):
                    await self._wait_for_room()
                    self._writer.write(frame[at : at + _WRITE_BYTES] if len(frame) > _WRITE_BYTES else frame)
                    begun = True
            done = True
        finally:
            if begun and not done:
                self._cut()

    async def _wait_for_room(self) -> None:
        try:
            if not self.closed:
                await self._writer.drain()
        except OSError as error:
            raise StreamClosed(f"the stream broke: {error}") from error
        if self.closed:
            raise StreamClosed("the stream is closed")

    def _cut(self) -> None:
        """Drops what is unsent. A transport that has closed after its last byte must not be aborted: asyncio of 3.11
        raises AttributeError then."""
        self._closing = True
        if not self._writer.is_closing() or self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()

    async def _linger(self) -> None:
        """Gives the other side a moment to read and to close first, and drops what it still sends: closing with bytes
        unread, or a reset on the heels of the last frame, may destroy that frame."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while await self._read():
                    pass


def _with_payload(step: pb.Step, activations: Activations | None) -> tuple[pb.Step, memoryview]:
    if step.payload:
        raise ValueError("give the activations as an array, not in step.payload")
    if activations is None:
        return step, memoryview(b"")
    if activations.ndim != 2 or activations.shape[0] != step.n_tokens:
        raise ValueError(f"activations of shape {activations.shape} for a step of {step.n_tokens} rows")
    filled = pb.Step()
    filled.CopyFrom(step)
    filled.encoding = step.encoding or pb.F32_LE
    payload = encode_activations(activations, filled.encoding)
    filled.width = activations.shape[1]
    filled.payload_bytes = len(payload)
    return filled, payload

"""The engine in a child process, from the parent's side: its abort or out-of-memory kill costs the slots, not the node.

Ownership: an ``EngineProcess`` owns one child. ``close`` ends it; so does the parent's death, whatever its cause.
Restarting means starting another ``EngineProcess``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from shim import messages, wire
from shim.errors import EngineDied
from shim.types import (
    Bytes,
    EngineConfig,
    EngineInfo,
    Floats,
    Ints,
    KvData,
    KvRowBytes,
    StepBatch,
    StepResult,
    SummarySpec,
)

logger = logging.getLogger(__name__)

STDERR_LINES = 50
_DRAIN_SECONDS = 1.0
_RECEIVE_BYTES = 256 << 10
_ROOT = str(Path(__file__).resolve().parent.parent)

OnProgress = Callable[[float], None]


@dataclass(frozen=True)
class _Reply:
    fields: wire.Fields
    arrays: wire.Arrays
    seconds: float  # since the request was sent, or since the reply before it: what it waited for others is not its own


@dataclass(frozen=True)
class _Pending:
    future: asyncio.Future[_Reply]
    sent_seconds: float  # time.monotonic()


class _Link(asyncio.BufferedProtocol):
    """The parent's end of the socket: requests out, replies in the same order."""

    def __init__(self, on_progress: OnProgress | None, on_lost: Callable[[str], None]) -> None:
        self._on_progress = on_progress
        self._on_lost = on_lost
        self._parser = wire.Parser()
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._pending: collections.deque[_Pending] = collections.deque()
        self._last_reply_seconds = 0.0
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for fields, arrays in self._parser.feed(self._buffer[:nbytes]):
                self._take(fields, arrays)
        except wire.GarbledMessage as error:
            self._lose(f"it sent {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost("")

    def request(self, message: bytes) -> asyncio.Future[_Reply]:
        """Sends at once; never blocks. Cancelling the future only drops the reply."""
        assert self._transport is not None
        future: asyncio.Future[_Reply] = self._loop.create_future()
        self._pending.append(_Pending(future, time.monotonic()))
        self._transport.write(message)
        return future

    def fail(self, error: EngineDied) -> None:
        """Fails every request that waits for its reply."""
        while self._pending:
            future = self._pending.popleft().future
            if not future.done():
                future.set_exception(_copy(error))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _take(self, fields: wire.Fields, arrays: wire.Arrays) -> None:
        if "progress" in fields:
            if self._on_progress is not None:
                self._on_progress(float(fields["progress"]))
        elif not self._pending:
            self._lose("it answered what was not asked")
        else:
            self._answer(self._pending.popleft(), fields, arrays)

    def _answer(self, pending: _Pending, fields: wire.Fields, arrays: wire.Arrays) -> None:
        now = time.monotonic()
        started = max(pending.sent_seconds, self._last_reply_seconds)
        self._last_reply_seconds = now
        if not pending.future.done():
            pending.future.set_result(_Reply(fields, arrays, now - started))

    def _lose(self, reason: str) -> None:
        self._on_lost(reason)
        self.close()


class EngineProcess:
    """A span loaded in a child process.

    Calls are answered in the order they are made; several may wait at once, and those behind a running step wait in the
    socket. Cancelling a call drops its reply, the child still runs it. When the child is gone, every waiting and later
    call raises EngineDied, and ``died`` resolves, unless ``close`` was called.
    """

    info: EngineInfo

    def __init__(self, process: asyncio.subprocess.Process, loop: asyncio.AbstractEventLoop) -> None:
        self.died: asyncio.Future[EngineDied] = loop.create_future()
        self._process = process
        self._link: _Link | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self._reason = ""
        self._closing = False
        self._death: EngineDied | None = None
        self._stderr_task = loop.create_task(self._read_stderr())
        self._watch_task = loop.create_task(self._watch())

    @classmethod
    async def start(cls, config: EngineConfig, on_progress: OnProgress | None = None) -> EngineProcess:
        """Starts a child and loads the span in it. Raises what ``Engine.open`` raises, or EngineDied when the child
        did not survive loading. Cancelling ends the child."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await _spawn(theirs)
        except BaseException:
            ours.close()
            raise
        loop = asyncio.get_running_loop()
        engine = cls(process, loop)
        try:
            _, engine._link = await loop.create_unix_connection(
                lambda: _Link(on_progress, engine._connection_lost), sock=ours
            )
            reply = await engine._call(messages.open_request(config))
            engine.info = messages.read_info(reply.fields)
        except BaseException:
            await engine.close()
            ours.close()
            raise
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    async def step(self, batch: StepBatch, summaries: Sequence[SummarySpec] = ()) -> tuple[StepResult, float]:
        """``Engine.step`` in the child. The second value is the seconds spent beside computing and beside waiting for
        earlier calls: both ways through the socket, and summing up rows."""
        reply = await self._call(messages.step_request(batch, summaries))
        result = messages.read_step_reply(reply.fields, reply.arrays)
        return result, max(0.0, reply.seconds - result.compute_seconds)

    async def row(self, slot: int) -> Floats:
        """``Engine.row`` in the child."""
        reply = await self._call(wire.encode({"op": "row", "slot": slot}))
        return reply.arrays["row"]

    async def truncate(self, slot: int, position: int) -> None:
        """``Engine.truncate`` in the child."""
        await self._call(wire.encode({"op": "truncate", "slot": slot, "position": position}))

    async def position(self, slot: int) -> int:
        """``Engine.position`` in the child."""
        reply = await self._call(wire.encode({"op": "position", "slot": slot}))
        return int(reply.fields["position"])

    async def draft(self, slot: int, count: int) -> Ints:
        """``Engine.draft`` in the child."""
        return (await self._call(wire.encode({"op": "draft", "slot": slot, "count": count}))).arrays["ids"]

    async def kv_row_bytes(self, layer: int) -> KvRowBytes:
        """``Engine.kv_row_bytes`` in the child."""
        reply = await self._call(wire.encode({"op": "kv_row_bytes", "layer": layer}))
        return KvRowBytes(**reply.fields["kv_row_bytes"])

    async def kv_read(self, slot: int, layer: int, first: int, count: int) -> Bytes:
        """``Engine.kv_read`` in the child."""
        fields = {"op": "kv_read", "slot": slot, "layer": layer, "first": first, "count": count}
        return (await self._call(wire.encode(fields))).arrays["rows"]

    async def kv_write(self, slot: int, layer: int, first: int, data: KvData) -> None:
        """``Engine.kv_write`` in the child."""
        rows = np.frombuffer(data, np.uint8)
        await self._call(wire.encode({"op": "kv_write", "slot": slot, "layer": layer, "first": first}, {"rows": rows}))

    async def kv_copy(self, source: int, target: int, layer: int, first: int, count: int) -> None:
        """``Engine.kv_copy`` in the child."""
        slots = {"source": source, "target": target}
        await self._call(wire.encode({"op": "kv_copy", **slots, "layer": layer, "first": first, "count": count}))

    async def refresh(self) -> EngineInfo:
        """``info`` with the memory that is taken now."""
        self.info = messages.read_info((await self._call(wire.encode({"op": "info"}))).fields)
        return self.info

    def kill(self, reason: str) -> None:
        """Ends a child that hangs: every waiting call raises EngineDied, which tells ``reason``."""
        self._reason = self._reason or reason
        self._kill()

    async def close(self) -> None:
        """Ends the child and waits until it is gone. May be called again."""
        self._closing = True
        self._kill()  # at once, even in the middle of a step: there is nothing to save
        await self._watch_task

    async def __aenter__(self) -> EngineProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, message: bytes) -> _Reply:
        if self._death is not None:
            raise _copy(self._death)
        if self._closing or self._link is None:
            raise EngineDied("the engine is closed")
        reply = await self._link.request(message)
        if "error" in reply.fields:
            raise messages.read_error(reply.fields)
        return reply

    def _connection_lost(self, reason: str) -> None:
        self._reason = self._reason or reason
        if not self._closing:
            self._kill()

    def _kill(self) -> None:
        if self._process.returncode is None:
            # not Process.kill: it may reap the child on the way, and the exit code is then lost to asyncio's watcher
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def _watch(self) -> None:
        """Waits for the child's end and tells everyone."""
        await self._process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self._stderr_task
        self._death = self._obituary()
        if self._link is not None:
            self._link.fail(self._death)
            self._link.close()
        if not self._closing:
            logger.debug("%s", self._death)
            if not self.died.done():
                self.died.set_result(self._death)

    def _obituary(self) -> EngineDied:
        code = self._process.returncode
        if self._closing:
            return EngineDied("the engine is closed", code, tuple(self._lines))
        how = f"ended with exit code {code}" if code is None or code >= 0 else f"was killed by {_signal_name(-code)}"
        detail = f" ({self._reason})" if self._reason else ""
        spoke = self._lines and code != -signal.SIGKILL  # what it said before a kill has nothing to do with it
        last = f"; its last words: {self._lines[-1]}" if spoke else ""
        return EngineDied(f"the engine process {self.pid} {how}{detail}{last}", code, tuple(self._lines))

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        rest = b""
        while data := await self._process.stderr.read(4096):
            *lines, rest = (rest + data)[-65536:].split(b"\n")
            for line in lines:
                self._keep(line)
        if rest:
            self._keep(rest)

    def _keep(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            self._lines.append(text)
            logger.debug("engine %d: %s", self.pid, text)


def _copy(death: EngineDied) -> EngineDied:
    """An own instance for each caller: an exception raised twice would chain tracebacks."""
    return EngineDied(str(death), death.exit_code, death.last_lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def _spawn(connection: socket.socket) -> asyncio.subprocess.Process:
    # The package is found wherever the parent found it, and behind everything else, so that it shadows nothing.
    code = f"import sys; sys.path.append({_ROOT!r}); from shim.worker import main; main()"
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, str(connection.fileno()), str(os.getpid())),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=(connection.fileno(),),
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # else an abort starts a debugger
    )

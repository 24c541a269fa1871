"""One connection through the proxy: two sockets and what is on its way between them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from bench.links.line import End, Line
from bench.links.path import Path

SOCKET_BUFFER_BYTES = 256 << 10  # a fixed size: the kernel would let it grow to megabytes


class Pump:
    """Carries bytes from ``source`` to ``sink``, and then the end. Raises OSError when either was reset."""

    def __init__(self, source: socket.socket, sink: socket.socket, line: Line) -> None:
        self._source = source
        self._sink = sink
        self._line = line
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._write())

    async def _read(self) -> None:
        try:
            while data := await self._receive():
                await self._line.put(data)
        except OSError:
            await self._line.put(End.RESET)
        else:
            await self._line.put(End.CLOSE)

    async def _receive(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return self._source.recv(self._line.piece_bytes)
        self._line.sender_is_idle()
        return await self._loop.sock_recv(self._source, self._line.piece_bytes)

    async def _write(self) -> None:
        while not isinstance(item := await self._line.get(), End):
            try:
                await self._loop.sock_sendall(self._sink, item)
            except OSError:
                await self._line.let_pass(is_end=True)  # that the receiver is gone is news for the sender, too
                raise
        if item is End.RESET:
            raise ConnectionResetError
        self._sink.shutdown(socket.SHUT_WR)


async def carry(near: socket.socket, far: socket.socket, path: Path) -> None:
    """Runs until both directions have ended, and closes both sockets: with RST when one was reset or when cancelled."""
    orderly = False
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Pump(near, far, Line(path.forward)).run())
            tasks.create_task(Pump(far, near, Line(path.backward)).run())
        orderly = True
    except* OSError:
        pass
    finally:
        for end in (near, far):
            close(end, reset=not orderly)


def tune(end: socket.socket) -> None:
    """Call it before the socket is connected, or listens: the window is agreed on then."""
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        end.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BUFFER_BYTES)


def close(end: socket.socket, *, reset: bool) -> None:
    if reset:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()

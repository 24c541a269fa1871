"""Pairs of real sockets with frame streams on one or both ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable

from swarm.protocol import FrameStream

RawEnd = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the state is the transport's, which sets no event
        await asyncio.sleep(0)


async def raw_pair() -> tuple[RawEnd, RawEnd]:
    left, right = socket.socketpair()
    return await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)


async def cut(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def stream_and_raw() -> AsyncIterator[tuple[FrameStream, RawEnd]]:
    ours, theirs = await raw_pair()
    stream = FrameStream(*ours)
    try:
        yield stream, theirs
    finally:
        await cut(theirs[1])
        await stream.close()


@contextlib.asynccontextmanager
async def stream_pair() -> AsyncIterator[tuple[FrameStream, FrameStream]]:
    ours, theirs = await raw_pair()
    left, right = FrameStream(*ours), FrameStream(*theirs)
    try:
        yield left, right
    finally:
        await left.close()
        await right.close()


@contextlib.asynccontextmanager
async def fragmenting_pair(seed: int) -> AsyncIterator[tuple[FrameStream, FrameStream]]:
    """What the left stream sends reaches the right one through a relay that cuts it at random places."""
    (ours, relay_in), (relay_out, theirs) = await raw_pair(), await raw_pair()
    left, right = FrameStream(*ours), FrameStream(*theirs)
    relay = asyncio.create_task(_relay(relay_in[0], relay_out[1], random.Random(seed)))
    try:
        yield left, right
    finally:
        await left.close()
        await relay
        await right.close()
        await cut(relay_in[1])
        await cut(relay_out[1])


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: random.Random) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            at = 0
            while at < len(data):
                size = chance.choice([1, 2, 3, 5, 100, 4096, 1 << 15, 1 << 16])
                writer.write(data[at : at + size])
                at += size
                await writer.drain()
                await asyncio.sleep(0)
        writer.write_eof()


@contextlib.asynccontextmanager
async def tcp_pair() -> AsyncIterator[tuple[FrameStream, RawEnd]]:
    """Over TCP, which tells an orderly end from a reset."""
    accepted: asyncio.Queue[RawEnd] = asyncio.Queue()
    server = await asyncio.start_server(lambda *end: accepted.put_nowait(end), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    theirs = await asyncio.open_connection(host, port)
    stream = FrameStream(*await accepted.get())
    try:
        yield stream, theirs
    finally:
        await cut(theirs[1])
        await stream.close()
        server.close()
        await server.wait_closed()

"""Signs of life to whoever feeds a stream: a step may take long, and a cut link says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.node.shared import clock_us
from swarm.protocol import FrameStream, StreamClosed, pb


@asynccontextmanager
async def beating(stream: FrameStream, seconds: float) -> AsyncIterator[None]:
    """Sends a Pong every ``seconds`` while inside."""
    beat = asyncio.create_task(_beat(stream, seconds))
    try:
        yield
    finally:
        beat.cancel()
        await asyncio.wait({beat})


async def _beat(stream: FrameStream, seconds: float) -> None:
    try:
        while True:
            await asyncio.sleep(seconds)
            await stream.send(pb.Pong(clock_us=clock_us()))
    except StreamClosed:
        return  # the one who reads notices

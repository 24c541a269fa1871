"""The door for every stream from outside: counts streams, and turns what goes wrong into an Error frame."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from swarm.ids import PeerId
from swarm.node.config import Limits
from swarm.node.files import open_files_limit
from swarm.node.sessions import RETRY_AFTER_SECONDS
from swarm.node.tally import Tally
from swarm.protocol import FrameStream, Received, StreamClosed, WireError, pb

logger = logging.getLogger(__name__)

FILES_FOR_THE_REST = 128  # of this process: the network, the engine, the model's files

Handler = Callable[[PeerId, FrameStream], Awaitable[None]]


class Gate:
    """Wraps handlers for ``Peer.serve_stream``. A handler may raise WireError (sent to the peer) and StreamClosed."""

    def __init__(self, limits: Limits, tally: Tally) -> None:
        self._most_of_peer = limits.streams_per_peer
        self._most = min(limits.streams, open_files_limit() - FILES_FOR_THE_REST)
        self._tally = tally
        self._open: Counter[PeerId] = Counter()
        self._changed = asyncio.Event()
        self._streams: set[FrameStream] = set()

    @property
    def open_streams(self) -> int:
        return self._open.total()

    async def empty(self) -> None:
        """Returns when no handler runs."""
        while self._open.total():
            self._changed.clear()
            await self._changed.wait()

    async def cut(self) -> None:
        """Closes every stream, which ends its handler."""
        await asyncio.gather(*(stream.close() for stream in tuple(self._streams)))

    def around(
        self, protocol: str, handler: Handler
    ) -> Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        meter = self._tally.streams[protocol]

        async def handle(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # no step is taken, nor room made for one, before the stream belongs to a session
            peer, stream = PeerId(peer_id), FrameStream(reader, writer, max_step_bytes=0, meter=meter)
            self._open[peer] += 1
            self._streams.add(stream)
            try:
                await self._handle(handler, peer, stream)
            finally:
                self._streams.discard(stream)
                self._open[peer] -= 1
                if not self._open[peer]:
                    del self._open[peer]
                self._changed.set()

        return handle

    async def _handle(self, handler: Handler, peer: PeerId, stream: FrameStream) -> None:
        try:
            if self._open[peer] > self._most_of_peer:
                raise _too_many(f"{self._most_of_peer} streams of one peer are open here, and it may have no more")
            if self.open_streams > self._most:
                raise _too_many(f"{self._most} streams are open here, as many as the node can have")
            await handler(peer, stream)
        except WireError as error:
            self._tally.failures[pb.ErrorCode.Name(error.code).lower()] += 1
            logger.info("refused peer %s: %s", peer, error.message)
            await stream.refuse(error)
        except StreamClosed as closed:
            logger.debug("peer %s is gone: %s", peer, closed)
        finally:
            await stream.close()


def _too_many(what: str) -> WireError:
    return WireError(pb.LIMIT_REACHED, what, retry_after_seconds=RETRY_AFTER_SECONDS)


async def first_frame(stream: FrameStream, seconds: float) -> Received:
    """What a stream begins with. Raises WireError when nothing comes in time, StreamClosed when it ends."""
    try:
        async with asyncio.timeout(seconds):
            received = await stream.receive()
    except TimeoutError:
        raise WireError(pb.NOT_ALLOWED, f"nothing was said for {seconds:g} s") from None
    if received is None:
        raise StreamClosed("the stream ended before it began")
    return received


def unexpected(received: object) -> WireError:
    return WireError(pb.NOT_ALLOWED, f"a {type(received).__name__} is not expected here")

"""Questions to a node outside any session: what it is, and pieces of its artifact."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dht.errors import DhtError
from swarm.client.artifact_cache import PieceRequest, Source
from swarm.client.config import Timeouts
from swarm.client.hop import Network
from swarm.errors import PeerFailed
from swarm.protocol import INFO_STREAM, FrameStream, StreamClosed, WireError, pb, to_swarm_error

PROBES = 2  # round trips, of which the shorter counts


class InfoReader:
    """Opens one info stream per question. Implements ``PieceReader``."""

    def __init__(self, network: Network, timeouts: Timeouts) -> None:
        self._network = network
        self._timeouts = timeouts

    async def describe(self, source: Source) -> pb.NodeDescription:
        """Raises PeerFailed."""
        async with self._asked(source, pb.DescribeRequest()) as stream:
            return await self._description(source, stream)

    async def probe(self, source: Source) -> tuple[pb.NodeDescription, float]:
        """The description and the seconds of a round trip, on a stream that is open already. Raises PeerFailed."""
        async with self._asked(source, pb.DescribeRequest()) as stream:
            said = await self._description(source, stream)
            trips = []
            for _ in range(PROBES):
                began = time.monotonic()
                await stream.send(pb.DescribeRequest())
                said = await self._description(source, stream)
                trips.append(time.monotonic() - began)
            return said, min(trips)

    async def _description(self, source: Source, stream: FrameStream) -> pb.NodeDescription:
        answer = await self._receive(source, stream)
        if not isinstance(answer, pb.NodeDescription):
            raise to_swarm_error(_out_of_order(answer), source.peer_id)
        return answer

    async def parts(self, source: Source, request: PieceRequest, offset: int) -> AsyncIterator[tuple[int, bytes]]:
        """Yields (total bytes, data) from ``offset`` to the end."""
        question = pb.ArtifactRequest(artifact_id=request.artifact_id, piece=request.piece, offset=offset)
        async with self._asked(source, question) as stream:
            while True:
                part = await self._receive(source, stream)
                if not isinstance(part, pb.ArtifactPart) or part.offset != offset:
                    raise to_swarm_error(_out_of_order(part), source.peer_id)
                offset += len(part.data)
                yield part.total_bytes, part.data
                if offset >= part.total_bytes:
                    return

    @asynccontextmanager
    async def _asked(
        self, source: Source, question: pb.DescribeRequest | pb.ArtifactRequest
    ) -> AsyncIterator[FrameStream]:
        try:
            async with asyncio.timeout(self._timeouts.connect_seconds):
                streams = await self._network.open_stream(source.peer_id, INFO_STREAM, source.addresses)
        except TimeoutError as error:
            raise _silent(source, self._timeouts.connect_seconds) from error
        except (DhtError, OSError) as error:
            raise to_swarm_error(StreamClosed(str(error)), source.peer_id) from error
        stream = FrameStream(*streams, max_step_bytes=0)
        try:
            await stream.send(question)
            yield stream
        except StreamClosed as error:
            raise to_swarm_error(error, source.peer_id) from error
        finally:
            await stream.close()

    async def _receive(self, source: Source, stream: FrameStream) -> object:
        try:
            async with asyncio.timeout(self._timeouts.metadata_seconds):
                answer = await stream.receive()
        except TimeoutError as error:
            raise _silent(source, self._timeouts.metadata_seconds) from error
        except (StreamClosed, WireError) as error:
            raise to_swarm_error(error, source.peer_id) from error
        if answer is None:
            raise to_swarm_error(StreamClosed("before it had answered"), source.peer_id)
        if isinstance(answer, pb.Error):
            raise to_swarm_error(answer, source.peer_id)
        return answer


def _out_of_order(body: object) -> WireError:
    return WireError(pb.MALFORMED, f"{type(body).__name__} is out of order")


def _silent(source: Source, seconds: float) -> PeerFailed:
    return PeerFailed(f"peer {source.peer_id} did not answer within {seconds:g} s; try again", source.peer_id)

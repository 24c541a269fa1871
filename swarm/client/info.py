"""Questions to a node outside any session: what it is, and pieces of its artifact."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing

from swarm.client.artifact_cache import PieceRequest, Source
from swarm.client.config import Timeouts
from swarm.client.hop import Network
from swarm.protocol import pb
from swarm.protocol.questions import Questions

PROBES = 2  # round trips, of which the shorter counts


class InfoReader:
    """Opens one info stream per question. Implements ``PieceReader``."""

    def __init__(self, network: Network, timeouts: Timeouts) -> None:
        self._network = network
        self._timeouts = timeouts

    async def describe(self, source: Source) -> pb.NodeDescription:
        """Raises PeerFailed."""
        peer = self._peer(source)
        async with peer.asked(pb.DescribeRequest()) as stream:
            return await peer.description(stream)

    async def probe(self, source: Source) -> tuple[pb.NodeDescription, float]:
        """The description and the seconds of a round trip, on a stream that is open already. Raises PeerFailed."""
        peer = self._peer(source)
        async with peer.asked(pb.DescribeRequest()) as stream:
            said = await peer.description(stream)
            trips = []
            for _ in range(PROBES):
                began = time.monotonic()
                await stream.send(pb.DescribeRequest())
                said = await peer.description(stream)
                trips.append(time.monotonic() - began)
            return said, min(trips)

    async def parts(self, source: Source, request: PieceRequest, offset: int) -> AsyncIterator[tuple[int, bytes]]:
        """Yields (total bytes, data) from ``offset`` to the end."""
        async with aclosing(self._peer(source).parts(request.artifact_id, request.piece, offset)) as parts:
            async for part in parts:
                yield part

    def _peer(self, source: Source) -> Questions:
        timeouts = self._timeouts
        return Questions(
            self._network, source.peer_id, source.addresses, timeouts.connect_seconds, timeouts.metadata_seconds
        )

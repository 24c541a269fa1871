"""Questions to one node outside any session, for everybody who asks: a client, a tool, another node.

One stream per question, every wait bounded. What goes wrong, at either end, is a ``SwarmError`` that names the peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from dht.errors import DhtError
from swarm.errors import PeerFailed, SwarmError
from swarm.ids import ArtifactId, PeerId
from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.limits import INFO_STREAM
from swarm.protocol.parts import PartJoiner
from swarm.protocol.stream import FrameStream, Received
from swarm.protocol.wire_errors import StreamClosed, WireError, to_swarm_error


class Dialer(Protocol):
    """The part of ``dht.peer.Peer`` that reaches others."""

    async def open_stream(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = ()
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...


@dataclass(frozen=True)
class Questions:
    """Asks one peer."""

    network: Dialer
    peer_id: PeerId
    addresses: tuple[str, ...] = ()
    connect_seconds: float = 10.0
    answer_seconds: float = 30.0  # between two frames of an answer

    @asynccontextmanager
    async def asked(self, question: pb.DescribeRequest | pb.ArtifactRequest) -> AsyncIterator[FrameStream]:
        """A stream on which the question was sent."""
        try:
            async with asyncio.timeout(self.connect_seconds):
                streams = await self.network.open_stream(self.peer_id, INFO_STREAM, self.addresses)
        except TimeoutError as error:
            raise self._silent(self.connect_seconds) from error
        except (DhtError, OSError) as error:
            raise to_swarm_error(StreamClosed(str(error)), self.peer_id) from error
        stream = FrameStream(*streams, max_step_bytes=0)
        try:
            await stream.send(question)
            yield stream
        except StreamClosed as error:
            raise to_swarm_error(error, self.peer_id) from error
        finally:
            await stream.close()

    async def description(self, stream: FrameStream) -> pb.NodeDescription:
        """The answer to a DescribeRequest."""
        answer = await self._receive(stream)
        if not isinstance(answer, pb.NodeDescription):
            raise self._out_of_order(answer)
        return answer

    async def parts(
        self, artifact_id: ArtifactId, piece: pb.ArtifactPiece.ValueType, offset: int = 0
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yields (total bytes, data) from ``offset`` to the end; how much is too much is the caller's to say."""
        async with self.asked(pb.ArtifactRequest(artifact_id=artifact_id, piece=piece, offset=offset)) as stream:
            while True:
                part = await self._receive(stream)
                if not isinstance(part, pb.ArtifactPart) or part.offset != offset:
                    raise self._out_of_order(part)
                offset += len(part.data)
                yield part.total_bytes, part.data
                if offset >= part.total_bytes:
                    return

    async def piece(
        self, artifact_id: ArtifactId, piece: pb.ArtifactPiece.ValueType, max_bytes: int, seconds: float
    ) -> bytes:
        """A whole piece of at most ``max_bytes``, which has to arrive within ``seconds``."""
        joiner, data = PartJoiner(max_bytes), None
        try:
            async with (
                asyncio.timeout(seconds),
                self.asked(pb.ArtifactRequest(artifact_id=artifact_id, piece=piece)) as stream,
            ):
                while data is None:
                    part = await self._receive(stream)
                    if not isinstance(part, pb.ArtifactPart):
                        raise self._out_of_order(part)
                    data = joiner.add(part)
        except TimeoutError as error:
            raise self._silent(seconds) from error
        except WireError as error:
            raise to_swarm_error(error, self.peer_id) from error
        return data

    async def _receive(self, stream: FrameStream) -> Received:
        try:
            async with asyncio.timeout(self.answer_seconds):
                answer = await stream.receive()
        except TimeoutError as error:
            raise self._silent(self.answer_seconds) from error
        except (StreamClosed, WireError) as error:
            raise to_swarm_error(error, self.peer_id) from error
        if answer is None:
            raise to_swarm_error(StreamClosed("before it had answered"), self.peer_id)
        if isinstance(answer, pb.Error):
            raise to_swarm_error(answer, self.peer_id)
        return answer

    def _out_of_order(self, body: object) -> SwarmError:
        error = WireError(pb.MALFORMED, f"{type(body).__name__} is out of order")
        return to_swarm_error(error, self.peer_id)

    def _silent(self, seconds: float) -> PeerFailed:
        return PeerFailed(f"peer {self.peer_id} did not answer within {seconds:g} s; try again", self.peer_id)

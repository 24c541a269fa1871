"""Info streams: anyone may ask what a node serves, and for the manifest and the header bytes a client needs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from dht.record import NodeState
from swarm.ids import PeerId
from swarm.node.gate import unexpected
from swarm.node.shared import Shared
from swarm.node.software import software
from swarm.protocol import FrameStream, WireError, artifact_parts, pb

STATES = {NodeState.JOINING: pb.JOINING, NodeState.ONLINE: pb.ONLINE, NodeState.DRAINING: pb.DRAINING}


class InfoHandler:
    """Serves ``glm-swarm/1/info``: any number of requests, one by one. ``folder`` holds the artifact's files."""

    def __init__(self, shared: Shared, folder: Path) -> None:
        self._shared = shared
        self._folder = folder
        self._manifest_json = shared.manifest.to_json()
        self._header_bytes: bytes | None = None  # it may have many megabytes: everyone who asks is sent the same ones
        self._reading = asyncio.Lock()

    async def __call__(self, peer: PeerId, stream: FrameStream) -> None:
        try:
            await self._converse(peer, stream)
        except TimeoutError:
            return  # one that says nothing for long, or does not read

    async def _converse(self, peer: PeerId, stream: FrameStream) -> None:
        while True:
            async with self._limit():
                request = await stream.receive()
            match request:
                case None:
                    return
                case pb.DescribeRequest():
                    self._shared.rates.questions.take(peer)
                    async with self._limit():
                        await stream.send(self._description())
                case pb.ArtifactRequest():
                    self._shared.rates.pieces.take(peer)
                    await self._send_piece(stream, request)
                case _:
                    raise unexpected(request)

    def _limit(self) -> asyncio.Timeout:
        return asyncio.timeout(self._shared.timeouts.info_seconds)

    async def _send_piece(self, stream: FrameStream, request: pb.ArtifactRequest) -> None:
        ours = self._shared.manifest.artifact_id
        if request.artifact_id != ours:
            raise WireError(pb.WRONG_ARTIFACT, "another artifact is served here", theirs=request.artifact_id, ours=ours)
        for part in artifact_parts(await self._piece(request.piece), request.offset):
            async with self._limit():
                await stream.send(part)

    async def _piece(self, piece: pb.ArtifactPiece.ValueType) -> bytes:
        if piece == pb.MANIFEST:
            return self._manifest_json
        if piece == pb.HEADER:
            return await self._header()
        digests = self._shared.span_digests
        if digests is None:
            raise WireError(pb.NOT_READY, "not every tensor that this node serves has been digested")
        return digests.document

    async def _header(self) -> bytes:
        first = self._shared.manifest.files[0]
        try:
            async with self._reading:
                if self._header_bytes is None:
                    path = self._folder / first.name
                    self._header_bytes = await asyncio.to_thread(_read_start, path, first.header_bytes)
                return self._header_bytes
        except OSError:
            raise WireError(pb.INTERNAL, "the file can't be read any more") from None

    def _description(self) -> pb.NodeDescription:
        shared, speed = self._shared, self._shared.speed
        info = shared.host.info_or_none
        return pb.NodeDescription(
            artifact_id=shared.manifest.artifact_id,
            span=pb.Layers(first=shared.span[0], last=shared.span[1]),
            state=STATES[shared.state],
            numerics_id="" if info is None else info.numerics_id,
            slots=[pb.SlotClass(tokens=slot.tokens, total=slot.total, free=slot.free) for slot in shared.slots()],
            chunk_tokens=shared.chunk_tokens,
            software=software(),
            public_name=shared.public_name,
            queue=shared.queue,
            decode_tokens_per_second=speed.decode_tokens_per_second,
            prefill_tokens_per_second=speed.prefill_tokens_per_second,
            clock=time.time(),
            has_mtp=info is not None and info.n_mtp > 0,
            encodings=[pb.F32_LE, pb.F16_LE],
            journal_free_bytes=shared.journals.free_bytes,
        )


def _read_start(path: Path, n_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(n_bytes)

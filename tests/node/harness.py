"""A client made of bare frames, to say to nodes what a real client would, and what it never would."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dht.identity import Identity
from dht.peer import Peer
from shim.types import ContextSpec
from swarm.node.config import ModelOptions, NetworkOptions, NodeConfig, Timeouts
from swarm.node.node import SwarmNode
from swarm.protocol import CONTROL_STREAM, DATA_STREAM, FrameStream, pb

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
CHUNK = 16
CONTEXT = 64
SLOTS = (ContextSpec(4, CONTEXT), ContextSpec(1, 2 * CONTEXT))


def config(model: Path, layers: str, folder: Path, peers: Sequence[str] = (), **timeouts: float) -> NodeConfig:
    return NodeConfig(
        ModelOptions(model, layers, memory_bytes=4 << 30, contexts=SLOTS, chunk_tokens=CHUNK),
        NetworkOptions(tuple(peers), LOOPBACK, identity_path=folder / f"{secrets.token_hex(4)}.key"),
        Timeouts(**timeouts),
        measure_speed=False,
    )


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    """Waits on state; fails when it does not come."""
    async with asyncio.timeout(seconds):
        while not await _holds(condition):  # noqa: ASYNC110  # of another process, or of code that tells nobody
            await asyncio.sleep(0.005)


async def _holds(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> bool:
    held = condition()
    return held if isinstance(held, bool) else await held


async def slots_empty(node: SwarmNode) -> bool:
    """Whether the engine holds no token in any slot."""
    return not any([await node.shared.host.position(slot) for slot in range(len(node.shared.host.info.slot_tokens))])


@asynccontextmanager
async def client_peer(*nodes: SwarmNode) -> AsyncIterator[Peer]:
    async with await Peer.start(Identity.ephemeral(), initial_peers=nodes[0].addresses, client_only=True) as peer:
        for node in nodes:
            await peer.connect(node.peer_id, node.addresses)
        try:
            yield peer
        finally:
            await hang_up()


_spoken: list[FrameStream] = []


async def say(peer: Peer, node: SwarmNode, protocol: str) -> FrameStream:
    """A stream that a test need not close."""
    stream = FrameStream(*await peer.open_stream(node.peer_id, protocol))
    _spoken.append(stream)
    return stream


async def hang_up() -> None:
    """Closes every stream that was opened with ``say``."""
    await asyncio.gather(*(stream.close() for stream in _spoken))
    _spoken.clear()


async def hear(stream: FrameStream, seconds: float = 20.0) -> object:
    async with asyncio.timeout(seconds):
        return await stream.receive()


async def ended(stream: FrameStream) -> bool:
    """Whether the other side ends the stream, whatever it says before."""
    while await hear(stream) is not None:
        pass
    return True


def neighbour(node: SwarmNode) -> pb.Neighbour:
    return pb.Neighbour(peer_id=node.peer_id, addresses=node.addresses)


@dataclass
class Session:
    """Over the spans of ``nodes``; ``epoch`` and ``number`` are sent as they stand."""

    peer: Peer
    nodes: tuple[SwarmNode, ...]
    keep_journal: bool = False
    context_tokens: int = CONTEXT
    id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    epoch: int = 1
    number: int = 0
    control: list[FrameStream] = field(default_factory=list)
    data: FrameStream | None = None
    asides: list[object] = field(default_factory=list)  # what came between answers

    def opening(self, index: int) -> pb.Open:
        node = self.nodes[index]
        last = index == len(self.nodes) - 1
        return pb.Open(
            session_id=self.id,
            epoch=self.epoch,
            artifact_id=node.manifest.artifact_id,
            run=pb.Layers(first=node.span[0], last=node.span[1]),
            context_tokens=self.context_tokens,
            chunk_tokens=CHUNK,
            encoding=pb.F32_LE,
            predecessor=neighbour(self.nodes[index - 1]) if index else pb.Neighbour(peer_id=self.peer.peer_id),
            successor=None if last else neighbour(self.nodes[index + 1]),
            hop_index=index,
            keep_journal=self.keep_journal,
        )

    async def open(self) -> Session:
        for index, node in enumerate(self.nodes):
            control = await say(self.peer, node, CONTROL_STREAM)
            await control.send(self.opening(index))
            opened = await hear(control)
            assert isinstance(opened, pb.Opened), opened
            self.control.append(control)
        return self

    async def attach(self) -> FrameStream:
        self.data = await say(self.peer, self.nodes[0], DATA_STREAM)
        await self.data.send(pb.Attach(session_id=self.id, epoch=self.epoch))
        attached = await hear(self.data)
        assert isinstance(attached, pb.Attached), attached
        return self.data

    def step(self, start: int, tokens: Sequence[int], **changes: object) -> pb.Step:
        self.number += 1
        step = pb.Step(
            session_id=self.id,
            epoch=self.epoch,
            step=self.number,
            start=start,
            n_tokens=len(tokens),
            kind=pb.DECODE if len(tokens) == 1 else pb.PREFILL,
            tokens=tokens,
            output=pb.OutputRequest(last_row=True, top=5),
        )
        step.MergeFrom(pb.Step(**changes))  # type: ignore[arg-type]
        return step

    async def compute(self, start: int, tokens: Sequence[int], **changes: object) -> pb.Answer:
        assert self.data is not None
        await self.data.send_step(self.step(start, tokens, **changes))
        while isinstance(answer := await hear(self.control[-1]), pb.Pong | pb.Copied | pb.Draining):
            self.asides.append(answer)
        assert isinstance(answer, pb.Answer), answer
        return answer

    async def close(self) -> None:
        for stream in (*self.control, *([self.data] if self.data else [])):
            await stream.close()


@asynccontextmanager
async def session(
    peer: Peer, *nodes: SwarmNode, keep_journal: bool = False, context_tokens: int = CONTEXT
) -> AsyncIterator[Session]:
    made = Session(peer, nodes, keep_journal, context_tokens)
    try:
        await made.open()
        await made.attach()
        yield made
    finally:
        await made.close()

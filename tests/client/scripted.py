"""Hops that do as they are told, over real sockets: for the misbehaviour that no real node shows on demand."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dht.errors import PeerUnreachable
from swarm.client.chain import SessionTerms
from swarm.client.hop import HopPlace
from swarm.ids import ArtifactId, PeerId
from swarm.protocol import (
    DATA_STREAM,
    FrameStream,
    ReceivedStep,
    StreamClosed,
    WireError,
    pb,
    row_parts,
)

N_VOCAB = 600
OWN_ID = "client"
TERMS = SessionTerms(ArtifactId("0" * 64), N_VOCAB, context_tokens=1000, chunk_tokens=8)


async def until(condition: Callable[[], object]) -> None:
    """Returns when ``condition`` holds; the test's own time limit ends it when it never does."""
    while not condition():  # noqa: ASYNC110 (the state is of several kinds, not all of them events)
        await asyncio.sleep(0.001)


def row_of(token: int, position: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Logits that depend on the step: the next token is the most likely, but not by much."""
    row = np.random.default_rng((token, position)).normal(0, 1, N_VOCAB).astype(np.float32)
    row[(token + 1) % N_VOCAB] = row.max() + 0.5
    return row


def summary_of(
    row: np.ndarray[tuple[int], np.dtype[np.float32]], position: int, output: pb.OutputRequest
) -> pb.RowSummary:
    order = np.lexsort((np.arange(len(row)), -row))
    top, rest = order[: output.top], row[order[output.top :]].astype(np.float64) / (output.temperature or 1)
    return pb.RowSummary(
        position=position,
        top_ids=top.tolist(),
        top_logits=row[top].tolist(),
        rest_log_sum_exp=float(rest.max() + np.log(np.exp(rest - rest.max()).sum())) if len(rest) else float("-inf"),
        asked_logits=row[list(output.ids)].tolist() if output.ids else [],
    )


@dataclass
class ScriptedHop:
    """Answers as a good exit would (the steps of a chain all come to the entry; the exit answers them).

    ``on_step`` may answer in its place by returning True.
    """

    refuse: pb.Error | None = None
    on_reroute: Callable[[pb.Reroute], Sequence[pb.Rerouted | pb.Error]] = lambda route: [
        pb.Rerouted(epoch=route.epoch, position=route.keep_tokens)
    ]
    on_copy: Callable[[pb.CopyState], Sequence[pb.Copied]] = lambda copy: [
        pb.Copied(session_id=copy.session_id, understudy=copy.understudy.peer_id, position=copy.upto_tokens, done=True)
    ]
    answers_open: bool = True
    answers_pings: bool = True
    answers_steps: bool = True
    rows_refused: int = 0
    retry_after_seconds: float = 0.0
    on_step: Callable[[ScriptedHop, pb.Step], bool] = lambda _hop, _step: False
    opened: list[pb.Open] = field(default_factory=list)
    rerouted: list[pb.Reroute] = field(default_factory=list)
    copies: list[pb.CopyState] = field(default_factory=list)
    waits: bool = False  # as an understudy
    said: Counter[str] = field(default_factory=Counter)
    steps: list[pb.Step] = field(default_factory=list)
    control: FrameStream | None = None
    sessions: int = 0

    async def serve_control(self, stream: FrameStream) -> None:
        opening = await stream.receive()
        assert isinstance(opening, pb.Open)
        self.opened.append(opening)
        if self.refuse is not None:
            await stream.send(self.refuse)
            return
        if not self.answers_open:
            await stream.receive()
            return
        self.control = stream
        self.sessions += 1
        self.waits = opening.HasField("understudy_of")
        try:
            opened = pb.Opened(epoch=opening.epoch, slot_tokens=4096, numerics_id="n", clock_us=_now_us())
            opened.position = opening.fork_tokens
            await stream.send(opened)
            await self._listen(stream)
        finally:
            self.sessions -= 1

    async def _listen(self, stream: FrameStream) -> None:
        while (body := await stream.receive()) is not None:
            self.said[type(body).__name__] += 1
            if isinstance(body, pb.Ping) and self.answers_pings:
                held = max((step.start + step.n_tokens for step in self.steps), default=0)
                await stream.send(pb.Pong(nonce=body.nonce, clock_us=_now_us(), position=held))
            if isinstance(body, pb.CopyState):
                self.copies.append(body)
                for copied in self.on_copy(body):
                    copied.order = body.order
                    await stream.send(copied)
            if isinstance(body, pb.Reroute):
                self.waits = False
                self.rerouted.append(body)
                for answer in self.on_reroute(body):
                    await stream.send(answer)
            if isinstance(body, pb.RowRequest) and self.rows_refused:
                self.rows_refused -= 1
                await stream.send(pb.Error(code=pb.LIMIT_REACHED, retry_after_seconds=self.retry_after_seconds))
            elif isinstance(body, pb.RowRequest):
                step = self.steps[-1]
                for part in row_parts(body.position, row_of(step.tokens[-1], body.position).tobytes()):
                    await stream.send(part)

    async def answer(self, step: pb.Step) -> None:
        """As the exit."""
        answer = pb.Answer(
            session_id=step.session_id, epoch=step.epoch, step=step.step, position=step.start + step.n_tokens
        )
        if step.output.last_row:
            last = step.start + step.n_tokens - 1
            answer.rows.append(summary_of(row_of(step.tokens[-1], last), last, step.output))
        answer.timings.add(hop_index=0, received_us=_now_us(), sent_us=_now_us(), compute_us=10)
        await self.say(answer)

    async def say(self, body: pb.Answer | pb.Error | pb.LinkFailed | pb.Attached | pb.Draining | pb.Copied) -> None:
        assert self.control is not None
        await self.control.send(body)


class ScriptedNetwork:
    """A network of scripted hops; the last one is the exit, or the one that was last opened as such. ``close`` ends
    every stream."""

    def __init__(self, hops: Sequence[ScriptedHop]) -> None:
        self.peer_id = OWN_ID
        self.hops = list(hops)
        self.places = [
            HopPlace(index, PeerId(f"peer{index}"), (10 * index, 10 * (index + 1))) for index in range(len(self.hops))
        ]
        self.unreachable: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.streams: list[FrameStream] = []

    async def open_stream(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = ()
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if peer_id in self.unreachable:
            raise PeerUnreachable(peer_id, "connection refused")
        ours, theirs = socket.socketpair()
        hop = self.hops[[place.peer_id for place in self.places].index(PeerId(peer_id))]
        serve: Callable[[FrameStream], Awaitable[None]] = hop.serve_control
        if protocol == DATA_STREAM:
            serve = partial(self._serve_data, hop)
        making = asyncio.create_task(self._both_ends(theirs, ours))
        try:
            stream, mine = await asyncio.shield(making)
        except asyncio.CancelledError:  # asyncio would leave a connection behind that is half made
            stream, mine = await making
            mine[1].close()
            await asyncio.gather(stream.close(), mine[1].wait_closed())
            raise
        self.streams.append(stream)
        task = asyncio.create_task(self._serve(serve(stream), stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return mine

    async def _both_ends(
        self, theirs: socket.socket, ours: socket.socket
    ) -> tuple[FrameStream, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        stream: FrameStream | None = None
        try:
            stream = FrameStream(*await asyncio.open_connection(sock=theirs))
            return stream, await asyncio.open_connection(sock=ours)
        except BaseException:
            if stream is not None:
                await stream.close()
            ours.close()
            theirs.close()
            raise

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(stream.close() for stream in self.streams))

    async def idle(self) -> None:
        """Returns when every stream has ended: nothing is left of any session."""
        await asyncio.gather(*self._tasks)

    async def _serve(self, serving: Awaitable[None], stream: FrameStream) -> None:
        try:
            await serving
        except (StreamClosed, WireError):
            pass
        finally:
            await stream.close()

    async def _serve_data(self, entry: ScriptedHop, stream: FrameStream) -> None:
        attach = await stream.receive()
        assert isinstance(attach, pb.Attach)
        await stream.send(pb.Attached(epoch=attach.epoch))
        while isinstance(received := await stream.receive(), ReceivedStep):
            for hop in self.hops:
                hop.steps.append(received.step)
            if received.step.replay:
                continue
            if not entry.on_step(entry, received.step) and entry.answers_steps:
                await self._exit().answer(received.step)

    def _exit(self) -> ScriptedHop:
        exits = [
            hop for hop in self.hops if hop.sessions and not hop.waits and not hop.opened[-1].HasField("successor")
        ]
        return exits[-1] if exits else self.hops[-1]


def _now_us() -> int:
    return time.monotonic_ns() // 1000

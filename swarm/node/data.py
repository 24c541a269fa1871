"""Data streams: the predecessor attaches to a session and pushes its steps."""

from __future__ import annotations

from swarm.ids import PeerId, SessionId
from swarm.node.beat import beating
from swarm.node.gate import first_frame, unexpected
from swarm.node.live import LiveSession
from swarm.node.shared import Shared
from swarm.protocol import FrameStream, Received, ReceivedStep, WireError, pb

BYTES_PER_VALUE = 4


class DataHandler:
    """Serves ``glm-swarm/1/data``. Only the predecessor that the client named may write, and only to its session.

    It is told every second that this hop lives: a step may take long, and a cut link says nothing.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def __call__(self, peer: PeerId, stream: FrameStream) -> None:
        received = await first_frame(stream, self._shared.timeouts.first_frame_seconds)
        async with beating(stream, self._shared.timeouts.beat_seconds):
            await self._serve(peer, stream, received)

    async def _serve(self, peer: PeerId, stream: FrameStream, received: Received | None) -> None:
        live: LiveSession | None = None
        try:
            while received is not None:
                if isinstance(received, pb.Attach):
                    live = await self._attach(peer, stream, received)
                elif live is not None and isinstance(received, ReceivedStep):
                    await self._take(live, stream, received)
                else:
                    self._shared.counters["intruders"] += 1
                    raise unexpected(received.step if isinstance(received, ReceivedStep) else received)
                received = await stream.receive()
        finally:
            if live is not None and live.data is stream:
                live.data = None

    async def _attach(self, peer: PeerId, stream: FrameStream, attach: pb.Attach) -> LiveSession:
        live = self._shared.lives.get(SessionId(attach.session_id))
        if live is None:
            raise WireError(pb.UNKNOWN_SESSION, "no such session is open here")
        session = live.session
        if peer != session.route.predecessor.peer_id:
            self._shared.counters["intruders"] += 1
            raise WireError(pb.NOT_ALLOWED, "the session's client named another predecessor")
        if attach.epoch != session.epoch:
            raise WireError(pb.STALE_EPOCH, f"the session is in epoch {session.epoch} here")
        if live.understudy is not None:
            raise WireError(pb.NOT_ALLOWED, "an understudy computes nothing until its client has rerouted it")
        self._shared.attach(live, stream)
        stream.max_step_bytes = session.terms.chunk_tokens * self._shared.manifest.n_embd * BYTES_PER_VALUE
        await stream.send(pb.Attached(epoch=session.epoch, position=session.position))
        return live

    async def _take(self, live: LiveSession, stream: FrameStream, received: ReceivedStep) -> None:
        if received.step.session_id != live.session.id or live.data is not stream:
            self._shared.counters["intruders"] += 1
            raise WireError(pb.NOT_ALLOWED, "this stream is not attached to that session")
        await live.take(received)

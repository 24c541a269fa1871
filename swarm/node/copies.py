"""The copies of one session that its client has ordered."""

from __future__ import annotations

import asyncio

from swarm.ids import PeerId
from swarm.node.copier import Copier
from swarm.node.live import LiveSession
from swarm.node.sessions import Neighbour
from swarm.node.shared import Shared
from swarm.protocol import FrameStream, WireError, pb

MOST = 4  # at a time: a hop is moved to one node, or to a few that share its layers


class Copies:
    """``group`` owns the tasks, and ends them with the session."""

    def __init__(self, shared: Shared, live: LiveSession, control: FrameStream, group: asyncio.TaskGroup) -> None:
        self._shared = shared
        self._live = live
        self._control = control
        self._group = group
        self._running: dict[str, Copier] = {}

    async def order(self, order: pb.CopyState) -> None:
        """Begins a copy, or gives a running one its new aim. What can't be copied is told to the client."""
        peer_id = order.understudy.peer_id
        copier = self._running.get(peer_id)
        if copier is not None:
            copier.aim(order.upto_tokens, order.order)
            return
        refusal = self._refusal(order)
        if refusal:
            copied = pb.Copied(session_id=self._live.session.id, understudy=peer_id, failure=refusal, order=order.order)
            await self._control.send(copied)
            return
        to = Neighbour(PeerId(peer_id), tuple(order.understudy.addresses))
        copier = Copier(self._shared, self._live, self._control, to, (order.run.first, order.run.last))
        copier.aim(order.upto_tokens, order.order)
        self._running[peer_id] = copier
        self._group.create_task(self._run(copier))
        if self._shared.draining.is_set():
            first, last = order.run.first, order.run.last
            self._shared.say(f"draining: layers {first}:{last} of a session are being moved to {peer_id}")

    def _refusal(self, order: pb.CopyState) -> str:
        first, last = self._live.session.terms.run
        if self._live.understudy is not None:
            return "an understudy computes nothing that could be copied"
        if not first <= order.run.first < order.run.last <= last:
            return f"layers {order.run.first}:{order.run.last} are no part of the session's {first}:{last} here"
        if len(self._running) >= MOST:
            return f"{MOST} copies of the session are under way already"
        try:
            self._shared.rates.copies.take(self._live.session.owner)
        except WireError as limit:
            return limit.message
        return ""

    async def _run(self, copier: Copier) -> None:
        try:
            await copier.run()
        finally:
            del self._running[copier.peer_id]

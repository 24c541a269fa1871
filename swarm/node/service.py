"""A node's streams, put together: who answers what, and how it all ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from shim.errors import EngineDied
from swarm.node.control import ControlHandler
from swarm.node.data import DataHandler
from swarm.node.gate import Gate, Handler
from swarm.node.info import InfoHandler
from swarm.node.shared import Shared, engine_lost
from swarm.node.state import StateHandler
from swarm.protocol import CONTROL_STREAM, DATA_STREAM, INFO_STREAM, STATE_STREAM, WireError, pb

logger = logging.getLogger(__name__)

PROTOCOLS = (INFO_STREAM, CONTROL_STREAM, DATA_STREAM, STATE_STREAM)

StreamHandler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener(Protocol):
    """The part of ``dht.peer.Peer`` that takes streams."""

    async def serve_stream(self, protocol: str, handler: StreamHandler) -> None: ...


class Doors:
    """The streams of a node, which outlast the service behind them: a node that moves answers for another span."""

    def __init__(self) -> None:
        self.service: Service | None = None

    async def open(self, listener: Listener) -> None:
        for protocol in PROTOCOLS:
            await listener.serve_stream(protocol, partial(self._answer, protocol))

    async def _answer(
        self, protocol: str, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.service is not None:  # otherwise the stream is closed at once
            await self.service.answer(protocol, peer_id, reader, writer)


class Service:
    """Answers peers over ``shared`` until ``close``."""

    def __init__(self, shared: Shared, folder: Path) -> None:
        self.shared = shared
        self._gate = Gate(shared.limits, shared.tally)
        handlers: dict[str, Handler] = {
            INFO_STREAM: InfoHandler(shared, folder),
            CONTROL_STREAM: ControlHandler(shared),
            DATA_STREAM: DataHandler(shared),
            STATE_STREAM: StateHandler(shared),
        }
        self._handlers = {protocol: self._gate.around(protocol, handler) for protocol, handler in handlers.items()}

    @property
    def open_streams(self) -> int:
        return self._gate.open_streams

    async def answer(
        self, protocol: str, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Returns when the stream is over."""
        await self._handlers[protocol](peer_id, reader, writer)

    def engine_died(self, died: EngineDied) -> None:
        """Every session's state is gone: their clients are told and may open them again."""
        lost = len(self.shared.lives)
        if lost:
            logger.warning("%d sessions are lost with the engine; their clients are told", lost)
        for live in tuple(self.shared.lives.values()):
            self.shared.end(live, engine_lost(str(died), blamed=self.shared.host.blames(live.session.id)))

    async def close(self) -> None:
        """Ends the sessions that are left and waits until no handler runs."""
        self.shared.end_all(WireError(pb.NODE_DRAINING, "the node has left"))
        try:
            async with asyncio.timeout(5.0):
                await self._gate.empty()
        except TimeoutError:
            logger.warning("%d streams did not end in time and are cut", self._gate.open_streams)
            await self._gate.cut()

"""``swarm-node`` with a side door: a unix socket beside its identity file, for whoever runs the experiment.

A request is one line of JSON, so is its answer:
  {"do": "account"}                 what the node holds
  {"do": "hold", "position": P}     the next engine call with a row at or above P waits, and all behind it
  {"do": "held"}                    answered when one waits
  {"do": "release"}                 it goes on
  {"do": "garble"}                  the next step or answer that the node sends is garbage
  {"do": "poison", "session": S, "position": P}  the engine dies of every row of session S (hex) at or above P
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.faults.poison import Poison
from shim.errors import EngineError
from shim.types import StepBatch, StepResult, SummarySpec
from swarm.ids import SessionId
from swarm.node import cli
from swarm.node import node as node_module
from swarm.node.node import SwarmNode
from swarm.protocol import FrameStream, pb

GARBAGE = (64).to_bytes(4, "big") + b"\xff" * 64  # a frame's length, and what is no frame

_Step = Callable[[tuple[SessionId, ...], StepBatch, Sequence[SummarySpec]], Awaitable[tuple[StepResult, float]]]


class Latch:
    """Holds one engine call on its way. Calls pass in the order they came."""

    def __init__(self) -> None:
        self._position: int | None = None
        self._order = asyncio.Lock()
        self._held = asyncio.Event()
        self._released = asyncio.Event()

    def hold(self, position: int) -> None:
        self._position = position
        self._held.clear()
        self._released.clear()

    async def held(self) -> None:
        await self._held.wait()

    def release(self) -> None:
        self._position = None
        self._released.set()

    def close(self) -> None:
        """Nobody waits any more, for a call or in one."""
        self.release()
        self._held.set()

    def around(self, step: _Step) -> _Step:
        async def passing(
            sessions: tuple[SessionId, ...], batch: StepBatch, summaries: Sequence[SummarySpec]
        ) -> tuple[StepResult, float]:
            async with self._order:
                if self._position is not None and batch.position.max() >= self._position:
                    self._held.set()
                    await self._released.wait()
            return await step(sessions, batch, summaries)

        return passing


class Garbler:
    """Puts garbage in the place of steps to a successor and answers to a client, once for each ``ask``."""

    def __init__(self) -> None:
        self._asked = 0

    def ask(self) -> None:
        self._asked += 1

    def install(self) -> None:
        send, send_step = FrameStream.send, FrameStream.send_step

        async def send_or_garble(stream: FrameStream, body: Any, **more: Any) -> None:
            if not (isinstance(body, pb.Answer) and await self._garble(stream)):
                await send(stream, body, **more)

        async def send_step_or_garble(stream: FrameStream, step: pb.Step, *payload: Any, **more: Any) -> None:
            if not await self._garble(stream):
                await send_step(stream, step, *payload, **more)

        FrameStream.send = send_or_garble  # type: ignore[method-assign,assignment]
        FrameStream.send_step = send_step_or_garble  # type: ignore[method-assign,assignment]

    async def _garble(self, stream: FrameStream) -> bool:
        if not self._asked:
            return False
        self._asked -= 1
        async with stream._sending:  # what no user of a stream can do
            await stream._write([GARBAGE])
        return True


class Door:
    """Of a node that serves."""

    def __init__(self, node: SwarmNode) -> None:
        self._node = node
        self._latch = Latch()
        self._garbler = Garbler()
        self._poison = Poison(node.shared)
        self._server: asyncio.Server | None = None

    async def open(self, path: Path) -> None:
        host = self._node.shared.host
        host.step = self._latch.around(self._poison.around(host.step))  # type: ignore[method-assign,assignment]
        self._garbler.install()
        self._server = await asyncio.start_unix_server(self._answer, path)

    def close(self) -> None:
        self._latch.close()
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._obey(json.loads(await reader.readline()))
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except OSError:
            pass  # whoever asked has gone
        finally:
            writer.close()

    async def _obey(self, request: dict[str, Any]) -> dict[str, int]:
        match request["do"]:
            case "account":
                return await self._account()
            case "hold":
                self._latch.hold(request["position"])
            case "held":
                await self._latch.held()
            case "release":
                self._latch.release()
            case "garble":
                self._garbler.ask()
            case "poison":
                self._poison.add(SessionId(bytes.fromhex(request["session"])), request["position"])
        return {}

    async def _account(self) -> dict[str, int]:
        """Everything that is 0 in an idle node."""
        node = self._node
        host, journals = node.shared.host, node.shared.journals
        try:
            engine_tokens = sum([await host.position(slot) for slot in range(len(host.info.slot_tokens))])
        except EngineError:
            engine_tokens = -1  # it is being started again
        return {
            **asdict(node.counts()),
            "engine_tokens": engine_tokens,
            "streams": node.service.open_streams,
            "queue": node.shared.queue,
            "copies": node.shared.copies,
            "journals": journals.n_open,
            "journal_bytes": journals.used_bytes,
            "journal_file_bytes": journals.spilled_bytes,
        }


class WatchedNode(SwarmNode):
    """Opens the side door when it serves."""

    async def __aenter__(self) -> WatchedNode:
        await super().__aenter__()
        self._side_door = Door(self)
        await self._side_door.open(_door_path(self.config.network.identity_path))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._side_door.close()
        await super().__aexit__(kind, error, trace)


def _door_path(identity: Path | None) -> Path:
    if identity is None:
        raise SystemExit("a watched node needs --identity: its side door is beside it")
    return identity.with_suffix(".door")


def main() -> int:
    node_module.SwarmNode = WatchedNode  # type: ignore[misc]
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

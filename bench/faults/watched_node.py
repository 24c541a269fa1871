"""``swarm-node`` with a side door: a unix socket beside its identity file, for whoever runs the experiment.

A request is one line of JSON, so is its answer:
  {"do": "account"}                 what the node holds
  {"do": "hold", "position": P, "sessions": N}  of each session the next step with a row at or above P waits
  {"do": "held"}                    answered when N sessions wait
  {"do": "release"}                 they go on
  {"do": "garble", "sessions": N}   the next step or answer that the node sends of each of N sessions is garbage
  {"do": "poison", "session": S, "position": P}  the engine dies of every row of session S (hex) at or above P

A silence of its successor counts for less long than in other nodes: experiments have to wait for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.faults.poison import Poison
from shim.errors import EngineError
from swarm.ids import SessionId
from swarm.node import cli
from swarm.node import node as node_module
from swarm.node.config import NodeConfig
from swarm.node.live import Job
from swarm.node.node import SwarmNode
from swarm.node.reporter import Reporter
from swarm.node.scheduler import Runner, Work
from swarm.protocol import FrameStream, pb

GARBAGE = (64).to_bytes(4, "big") + b"\xff" * 64  # a frame's length, and what is no frame
SILENCE_SECONDS = 4.0


class Latch:
    """Keeps steps from the scheduler: of each session the first with a row at or above a position, and all after it."""

    def __init__(self, runner: Runner[Job]) -> None:
        self._runner = runner
        self._position: int | None = None
        self._kept: dict[SessionId, list[Work[Job]]] = {}
        self._wanted = 1
        self._met: set[SessionId] = set()
        self._held = asyncio.Event()

    def install(self) -> None:
        submit, drop = self._runner.submit, self._runner.drop

        def submit_or_keep(work: Work[Job]) -> None:
            if not self._keeps(work):
                submit(work)

        def drop_all(session: SessionId) -> tuple[Work[Job], ...]:
            return (*drop(session), *self._kept.pop(session, ()))

        self._submit = submit
        self._runner.submit = submit_or_keep  # type: ignore[method-assign]
        self._runner.drop = drop_all  # type: ignore[method-assign]

    def hold(self, position: int, sessions: int) -> None:
        self.release()
        self._position, self._wanted = position, sessions
        self._met.clear()
        self._held.clear()

    async def held(self) -> None:
        await self._held.wait()

    def release(self) -> None:
        self._position = None
        for kept in self._kept.values():
            for work in kept:
                self._submit(work)
        self._kept.clear()

    def close(self) -> None:
        """Nobody waits any more."""
        self._held.set()

    def _keeps(self, work: Work[Job]) -> bool:
        rows = work.job.rows
        if self._position is None or (work.session not in self._kept and rows.start + rows.count <= self._position):
            return False
        self._kept.setdefault(work.session, []).append(work)
        self._met.add(work.session)
        if len(self._met) >= self._wanted:
            self._held.set()
        return True


class Garbler:
    """Puts garbage in the place of steps to a successor and answers to a client, once for each session."""

    def __init__(self) -> None:
        self._left = 0
        self._met: set[bytes] = set()

    def ask(self, sessions: int) -> None:
        self._left = sessions
        self._met.clear()

    def install(self) -> None:
        send, send_step = FrameStream.send, FrameStream.send_step

        async def send_or_garble(stream: FrameStream, body: Any, **more: Any) -> None:
            if not (isinstance(body, pb.Answer) and await self._garble(stream, body.session_id)):
                await send(stream, body, **more)

        async def send_step_or_garble(stream: FrameStream, step: pb.Step, *payload: Any, **more: Any) -> None:
            if not await self._garble(stream, step.session_id):
                await send_step(stream, step, *payload, **more)

        FrameStream.send = send_or_garble  # type: ignore[method-assign,assignment]
        FrameStream.send_step = send_step_or_garble  # type: ignore[method-assign,assignment]

    async def _garble(self, stream: FrameStream, session: bytes) -> bool:
        if not self._left or session in self._met:
            return False
        self._left -= 1
        self._met.add(session)
        async with stream._sending:  # what no user of a stream can do
            await stream._write([GARBAGE])
        return True


class Door:
    """Of a node that serves."""

    def __init__(self, node: SwarmNode) -> None:
        self._node = node
        self._latch = Latch(node.shared.runner)
        self._garbler = Garbler()
        self._poison = Poison(node.shared)
        self._server: asyncio.Server | None = None

    async def open(self, path: Path) -> None:
        host = self._node.shared.host
        host.step = self._poison.around(host.step)  # type: ignore[method-assign,assignment]
        self._latch.install()
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
                self._latch.hold(request["position"], request["sessions"])
            case "held":
                await self._latch.held()
            case "release":
                self._latch.release()
            case "garble":
                self._garbler.ask(request["sessions"])
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

    def __init__(self, config: NodeConfig, reporter: Reporter | None = None) -> None:
        limits = {"silence_seconds": SILENCE_SECONDS, "connect_seconds": SILENCE_SECONDS}
        super().__init__(replace(config, timeouts=replace(config.timeouts, **limits)), reporter)

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

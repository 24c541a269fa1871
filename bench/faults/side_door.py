"""The experimenter's end of a watched node's side door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.links.linked_swarm import LinkedNode, LinkedSwarm, linked_swarm
from swarm.ids import SessionId

ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class SideDoor:
    """One connection per request. Raises OSError when the node is gone, TimeoutError when it is stopped."""

    path: Path

    async def account(self) -> dict[str, int]:
        """What the node holds, by name; see ``WatchedNode``."""
        return await self._ask({"do": "account"})

    async def hold_at(self, position: int, sessions: int = 1) -> None:
        """Of each session, the first step with a row at or above ``position`` is to wait, and what comes after it."""
        await self._ask({"do": "hold", "position": position, "sessions": sessions})

    async def held(self, seconds: float = ANSWER_SECONDS) -> None:
        """Returns when so many ``sessions`` wait."""
        await self._ask({"do": "held"}, seconds)

    async def release(self) -> None:
        await self._ask({"do": "release"})

    async def garble(self, sessions: int = 1) -> None:
        """The next step, or answer, that the node sends of each of so many ``sessions`` is garbage."""
        await self._ask({"do": "garble", "sessions": sessions})

    async def poison(self, session: SessionId, position: int) -> None:
        """The engine is to die of every row of ``session`` at or above ``position``."""
        await self._ask({"do": "poison", "session": session.hex(), "position": position})

    async def _ask(self, request: dict[str, str | int], seconds: float = ANSWER_SECONDS) -> dict[str, int]:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_unix_connection(self.path)
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
        if not line:
            raise ConnectionResetError(f"the node behind {self.path} ended")
        answer: dict[str, int] = json.loads(line)
        return answer


def node_door(node: LinkedNode) -> SideDoor:
    return SideDoor(node.process.log.with_suffix(".door"))


def watched_swarm(
    model: Path, spans: Sequence[tuple[int, int]], folder: Path, options: Sequence[str] = ()
) -> AbstractAsyncContextManager[LinkedSwarm]:
    """``linked_swarm`` of nodes with a side door each."""
    return linked_swarm(model, spans, folder, options, module="bench.faults.watched_node")

"""What nodes hold: every experiment has to end where it started."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.faults.side_door import node_door
from bench.links.linked_swarm import LinkedNode, LinkedSwarm

BACK_SECONDS = 60.0
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Accounting:
    """Of one watched node. ``held`` is its own account (sessions, slots, KV tokens, what the engine's slots hold,
    streams, queue); the rest is what the system knows of its process."""

    held: Mapping[str, int]
    children: int
    open_files: int
    temporary_files: int  # that have no name any more

    @staticmethod
    async def of(node: LinkedNode) -> Accounting:
        """Raises OSError when the node is gone."""
        held = await node_door(node).account()
        files = await asyncio.to_thread(_open_files, node.pid)
        children = await asyncio.to_thread(psutil.Process(node.pid).children, recursive=True)
        return Accounting(held, len(children), len(files), sum(name.endswith(" (deleted)") for name in files))

    @staticmethod
    async def of_swarm(swarm: LinkedSwarm) -> dict[int, Accounting]:
        """Of the nodes that run, by number."""
        return {node.number: await Accounting.of(node) for node in swarm.nodes if node.process.process.poll() is None}


async def idle_accounts(swarm: LinkedSwarm, seconds: float = BACK_SECONDS) -> dict[int, Accounting]:
    """What idle nodes hold, to be compared with later: nothing that is a session's, and the same in three looks, for a
    file may be open just for a moment."""
    await until_accounts(swarm, {}, seconds)
    looks: list[dict[int, Accounting]] = []
    async with asyncio.timeout(seconds):
        while len(looks) < 3 or looks[-3:] != [looks[-1]] * 3:
            await asyncio.sleep(POLL_SECONDS)
            looks.append(await Accounting.of_swarm(swarm))
    return looks[-1]


async def until_accounts(swarm: LinkedSwarm, expected: Mapping[int, Accounting], seconds: float = BACK_SECONDS) -> None:
    """Returns when every node that still runs holds what is expected of it; one that nothing is expected of, as one
    that joined later, holds nothing. Raises AssertionError with the differences."""
    wrong: dict[int, str] = {}
    try:
        async with asyncio.timeout(seconds):
            while wrong := await _differing(swarm, expected):  # noqa: ASYNC110  # of other processes
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise AssertionError(f"after {seconds:g} s: {wrong}") from None


async def _differing(swarm: LinkedSwarm, expected: Mapping[int, Accounting]) -> dict[int, str]:
    wrong = {}
    for number, account in (await Accounting.of_swarm(swarm)).items():
        wanted = expected.get(number)
        good = not any(account.held.values()) if wanted is None else account == wanted
        if not good:
            wrong[number] = f"{account} instead of {wanted or 'nothing held'}"
    return wrong


def _open_files(pid: int) -> list[str]:
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(os.readlink(entry))  # noqa: PTH115  # Path would tidy the name
        except FileNotFoundError:
            continue
    return names

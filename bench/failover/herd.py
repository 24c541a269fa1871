"""Nodes with replicas, struck by ``kill -9`` and replaced by new ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from dht.identity import Identity
from swarm.local_swarm import READY, NodeProcess, postponed_signals

Span = tuple[int, int]


@dataclass(eq=False)
class Member:
    """A node, alive or dead."""

    span: Span
    process: NodeProcess
    peer_id: str
    struck: bool = False  # it may take the system a while to end it

    @property
    def lives(self) -> bool:
        return not self.struck and self.process.process.poll() is None

    def family(self) -> list[int]:
        """Process ids: the node, then its libp2p daemon and its engine. Takes milliseconds: ask in time."""
        parent = psutil.Process(self.process.process.pid)
        return [parent.pid, *(child.pid for child in parent.children(recursive=True))]

    def kill(self, family: Sequence[int]) -> float:
        """As a power cut would; returns the moment on ``time.monotonic()``."""
        self.struck, moment = True, time.monotonic()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):  # it may have followed its parent already
                os.kill(pid, signal.SIGKILL)
        return moment


class Herd:
    """Made by ``herd``. Every node joins through ``door``, which must be a peer that nobody kills."""

    def __init__(self, model: Path, folder: Path, options: Sequence[str], door: str) -> None:
        self.members: list[Member] = []  # the dead are forgotten when they are replaced
        self._model = model
        self._folder = folder
        self._options = tuple(options)
        self._door = door
        self._started = 0

    async def add(self, spans: Sequence[Span]) -> None:
        """One node each, started at the same time; all serve when this returns. Raises ``SwarmError`` when a node does
        not come up."""
        fresh = [self._start(span) for span in spans]
        for member in fresh:
            await asyncio.to_thread(member.process.wait_for, READY)

    async def revive(self) -> int:
        """Starts a new node, of a new identity, for each dead one. Returns how many."""
        dead = [member for member in self.members if not member.lives]
        for member in dead:
            await asyncio.to_thread(member.process.join)
        self.members = [member for member in self.members if member not in dead]
        await self.add([member.span for member in dead])
        return len(dead)

    def member(self, peer_id: str) -> Member:
        return next(member for member in self.members if member.peer_id == peer_id)

    def has_spare(self, member: Member) -> bool:
        """Whether another node with the same span lives."""
        return any(other.lives and other.span == member.span for other in self.members if other is not member)

    def stop(self) -> None:
        for member in self.members:
            if member.lives:
                member.process.stop()

    async def join(self) -> None:
        for member in self.members:
            await asyncio.to_thread(member.process.join)

    def _start(self, span: Span) -> Member:
        number = self._started
        self._started += 1
        key = self._folder / f"node{number}.key"
        with Identity.load_or_create(key) as identity:
            peer_id = identity.peer_id
        arguments = ["--model", str(self._model), "--layers", "{}:{}".format(*span), "--listen", "127.0.0.1:0"]
        arguments += ["--identity", str(key), "--initial-peers", self._door, *self._options]
        with postponed_signals():
            member = Member(span, NodeProcess(arguments, self._folder / f"node{number}.log"), peer_id)
            self.members.append(member)
        return member


@contextlib.asynccontextmanager
async def herd(
    model: Path, folder: Path, spans: Sequence[Span], replicas: int, options: Sequence[str], door: str
) -> AsyncIterator[Herd]:
    """``replicas`` nodes for each span until the block ends; then all are gone. Logs and keys go to ``folder``."""
    made = Herd(model, folder, options, door)
    try:
        await made.add([span for _ in range(replicas) for span in spans])
        yield made
    finally:
        made.stop()
        await made.join()

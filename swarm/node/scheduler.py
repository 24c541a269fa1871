"""One idea: an engine call is either the waiting decode rows of many sessions that share a context and a run range, or
one prefill chunk of one session.

Mixing the two would cut chunks anew and change bits. A turn of rows (one call for each group that waits when the turn
begins) and one chunk alternate, so that a row waits for at most one chunk, and a chunk for at most one turn of rows.
Within both, the client peer that was given least goes first, and of its sessions the one served longest ago. Nothing
ever waits for a batch to fill.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from swarm.ids import PeerId, SessionId

J = TypeVar("J")

# A replay brings many decode rows in one step: from here on it stalls others like a chunk, and takes a chunk's turn.
MAX_SHARED_ROWS = 32


@dataclass(frozen=True)
class Group:
    """What rows must have in common to share an engine call."""

    context: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Work(Generic[J]):
    """One step of one session. ``chunk``: computed in a call of its own. ``suspect``: this one too, for the engine may
    die of it, and nobody else is to be blamed then."""

    session: SessionId
    peer: PeerId  # the client that opened the session
    group: Group
    rows: int
    chunk: bool
    job: J
    suspect: bool = False

    @property
    def alone(self) -> bool:
        return self.chunk or self.suspect or self.rows > MAX_SHARED_ROWS


class FairShare:
    """Rows given to each peer, in virtual time: who was away does not come back with a credit."""

    def __init__(self) -> None:
        self._given: dict[PeerId, int] = {}
        self._now = 0

    def given(self, peer: PeerId) -> int:
        return max(self._given.get(peer, 0), self._now)

    def charge(self, peer: PeerId, rows: int) -> None:
        before = self.given(peer)
        self._now = before
        self._given[peer] = before + rows

    def forget_idle(self, waiting: set[PeerId]) -> None:
        self._given = {peer: rows for peer, rows in self._given.items() if peer in waiting or rows > self._now}

    def __len__(self) -> int:
        return len(self._given)


class Policy(Generic[J]):
    """Queue in, next call out. Steps of one session leave in the order they came."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._queues: dict[SessionId, deque[Work[J]]] = {}  # served longest ago first
        self._share = FairShare()
        self._turn: deque[Group] = deque()
        self._chunk_due = False

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def push(self, work: Work[J]) -> None:
        self._queues.setdefault(work.session, deque()).append(work)

    def drop(self, session: SessionId) -> tuple[Work[J], ...]:
        """Forgets what waits for ``session`` and returns it."""
        return tuple(self._queues.pop(session, ()))

    def next(self, *, rows_only: bool = False) -> tuple[Work[J], ...]:
        """The next call; empty when nothing waits, or when it would be a chunk and only rows may go."""
        group = self._next_group()
        if group is not None:
            self._turn.popleft()
            self._chunk_due = True
            return self._take_rows(group)
        return () if rows_only else self._take_chunk()

    def _next_group(self) -> Group | None:
        waiting = list(dict.fromkeys(work.group for work in self._heads() if not work.alone))
        while self._turn and self._turn[0] not in waiting:
            self._turn.popleft()
        if not self._turn and not (self._chunk_due and self._chunk_waits()):
            self._turn.extend(waiting)
        return self._turn[0] if self._turn else None

    def _take_rows(self, group: Group) -> tuple[Work[J], ...]:
        peers: dict[PeerId, deque[Work[J]]] = {}
        for work in self._heads():
            if not work.alone and work.group == group:
                peers.setdefault(work.peer, deque()).append(work)
        taken: list[Work[J]] = []
        room = self._max_rows
        while peers:
            peer = min(peers, key=self._share.given)
            work = peers[peer].popleft()
            if not peers[peer]:
                del peers[peer]
            if work.rows <= room:
                room -= work.rows
                taken.append(self._take(work))
        return tuple(taken)

    def _take_chunk(self) -> tuple[Work[J], ...]:
        self._chunk_due = False
        chunks = [work for work in self._heads() if work.alone]
        if not chunks:
            return ()
        return (self._take(min(chunks, key=lambda work: self._share.given(work.peer))),)

    def _take(self, work: Work[J]) -> Work[J]:
        queue = self._queues.pop(work.session)
        queue.popleft()
        if queue:
            self._queues[work.session] = queue
        self._share.charge(work.peer, work.rows)
        if len(self._share) > 2 * len(self._queues) + 64:
            self._share.forget_idle({queue[0].peer for queue in self._queues.values()})
        return work

    def _chunk_waits(self) -> bool:
        return any(work.alone for work in self._heads())

    def _heads(self) -> Iterator[Work[J]]:
        return (queue[0] for queue in self._queues.values())


class Runner(Generic[J]):
    """Hands the policy's calls to ``execute``, at most ``calls_in_flight`` at a time and in order.

    A second call is handed over early only when both are rows: a chunk behind a call would commit the engine while
    rows may still arrive. An async context manager; leaving it cancels the calls under way.
    """

    def __init__(
        self,
        policy: Policy[J],
        execute: Callable[[tuple[Work[J], ...]], Awaitable[None]],
        calls_in_flight: int = 2,
    ) -> None:
        self._policy = policy
        self._execute = execute
        self._most = calls_in_flight
        self._calls: dict[asyncio.Task[None], bool] = {}  # whether the call is a chunk
        self._group = asyncio.TaskGroup()
        self._pump_due = False

    @property
    def waiting(self) -> int:
        """Steps not yet handed to the engine."""
        return len(self._policy)

    @property
    def in_flight(self) -> int:
        """Calls handed to the engine."""
        return len(self._calls)

    def submit(self, work: Work[J]) -> None:
        self._policy.push(work)
        self._pump_soon()

    def drop(self, session: SessionId) -> tuple[Work[J], ...]:
        return self._policy.drop(session)

    async def __aenter__(self) -> Runner[J]:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._calls:
            task.cancel()
        self._most = 0
        await self._group.__aexit__(kind, error, trace)

    def _pump_soon(self) -> None:
        # one pass of the loop later: steps that arrived together share a call
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        while len(self._calls) < self._most and not any(self._calls.values()):
            call = self._policy.next(rows_only=bool(self._calls))
            if not call:
                return
            self._calls[self._group.create_task(self._run(call))] = call[0].alone

    async def _run(self, call: tuple[Work[J], ...]) -> None:
        try:
            await self._execute(call)
        finally:
            task = asyncio.current_task()
            assert task is not None
            del self._calls[task]
            self._pump_soon()

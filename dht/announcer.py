"""Tells the swarm about this node, again and again, and notices when the swarm does not hear it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dht.clock import MAX_CLOCK_OFFSET_SECONDS, measure
from dht.envelope import seal_gone, seal_listing, seal_span
from dht.errors import ClockSkewed, InitialPeersUnreachable, PeerUnreachable
from dht.identity import Identity
from dht.keys import ARTIFACTS_KEY, segment_key, segments
from dht.listing import ArtifactEntry
from dht.record import SpanRecord
from dht.table import Entry

if TYPE_CHECKING:
    from dht.peer import Peer

logger = logging.getLogger(__name__)

WITHDRAW_SECONDS = 3.0


@dataclass(frozen=True)
class AnnounceTiming:
    every_seconds: float = 20.0
    expiry_seconds: float = 60.0  # two beats may get lost
    settle_seconds: float = 0.02  # changes that come together go out together
    gap_seconds: float = 1.0  # between changes of load; a change of state, span or address does not wait
    watch_seconds: float = 20.0


@dataclass(frozen=True)
class AnnounceStatus:
    """How announcing goes. ``heard`` is None as long as there is no other node to ask."""

    entries: int = 0
    stored: int = 0
    heard: bool | None = None
    clock_offset_seconds: float | None = None
    trouble: str = ""


class Announcer:
    """Publishes one ``SpanRecord`` from entering the context to leaving it, when it takes the record back.

    The context owns the tasks: an error in them cancels the block.
    """

    def __init__(
        self, peer: Peer, identity: Identity, cuts: Sequence[int], timing: AnnounceTiming | None = None
    ) -> None:
        self._peer = peer
        self._identity = identity
        self._cuts = tuple(cuts)
        self._timing = timing or AnnounceTiming()
        self._record: SpanRecord | None = None
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._announced: set[tuple[str, int]] = set()  # (artifact id, segment)
        self._expires = 0.0
        self._tasks = asyncio.TaskGroup()
        self._owned: list[asyncio.Task[None]] = []
        self.status = AnnounceStatus()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._owned = [self._tasks.create_task(self._publish_loop()), self._tasks.create_task(self._watch_loop())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._owned:
            task.cancel()
        try:
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from None  # the block's own error, or that of a task
        finally:
            await self.withdraw()

    def update(self, record: SpanRecord) -> None:
        """Announces the record soon, without waiting for it."""
        if _is_urgent(self._record, record):
            self._urgent.set()
        self._record = record
        self._changed.set()

    async def publish(self, record: SpanRecord) -> None:
        """Announces the record and waits until the nodes that answer have stored it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        self.update(record)
        self._urgent.set()
        await done

    async def withdraw(self) -> None:
        """Takes the record back: readers stop seeing this node at once. ``publish`` puts it there again."""
        self._record = None
        gone, self._announced = self._announced, set()
        if not gone or self._peer.lost.done():
            return
        expires = self._next_expiry()
        entries = [self._gone(artifact_id, segment, expires) for artifact_id, segment in sorted(gone)]
        try:
            async with asyncio.timeout(WITHDRAW_SECONDS):
                await self._peer.table.write(entries)
        except TimeoutError:
            logger.warning("could not take the announcement back; it expires in %g s", self._timing.expiry_seconds)

    async def _publish_loop(self) -> None:
        while True:
            await self._wait(self._changed, self._timing.every_seconds - self._timing.gap_seconds)
            await asyncio.sleep(self._timing.settle_seconds)
            self._changed.clear()
            self._urgent.clear()
            waiting, self._waiting = self._waiting, []
            await self._announce()
            for done in waiting:
                if not done.done():
                    done.set_result(None)
            await self._wait(self._urgent, self._timing.gap_seconds)

    async def _announce(self) -> None:
        record = self._record
        if record is None:
            return
        entries = self._entries(record)
        stored = await self._peer.table.write(entries)
        self.status = replace(self.status, entries=len(entries), stored=stored)
        if stored < len(entries):
            missing = len(entries) - stored
            logger.warning("%d of %d announcements found no place; trying again soon", missing, len(entries))

    def _entries(self, record: SpanRecord) -> list[Entry]:
        gone_expires, expires = self._next_expiry(), self._next_expiry()  # readers believe what expires last
        covered = segments(record.first, record.last, self._cuts)
        now = {(record.artifact_id, segment) for segment in covered}
        gone, self._announced = self._announced - now, now
        listing = ArtifactEntry(
            artifact_id=record.artifact_id, name=record.artifact_name, n_layers=record.n_layers, cuts=self._cuts
        )
        taken_back = [self._gone(artifact_id, segment, gone_expires) for artifact_id, segment in sorted(gone)]
        spans = [self._span(record, segment, expires) for segment in covered]
        return [*taken_back, *spans, Entry(ARTIFACTS_KEY, seal_listing(self._identity, expires, listing), expires)]

    def _span(self, record: SpanRecord, segment: int, expires: float) -> Entry:
        sealed = seal_span(self._identity, segment, expires, record)
        return Entry(segment_key(record.artifact_id, segment), sealed, expires)

    def _gone(self, artifact_id: str, segment: int, expires: float) -> Entry:
        sealed = seal_gone(self._identity, artifact_id, segment, expires)
        return Entry(segment_key(artifact_id, segment), sealed, expires)

    def _next_expiry(self) -> float:
        """Later than the last one, whatever the clock did: nodes keep the entry that expires last."""
        self._expires = max(self._peer.clock() + self._timing.expiry_seconds, self._expires + 1e-3)
        return self._expires

    async def _watch_loop(self) -> None:
        while True:
            await asyncio.sleep(self._timing.watch_seconds)
            trouble = await self._find_trouble()
            if trouble != self.status.trouble:
                if trouble:
                    logger.warning("%s", trouble)
                else:
                    logger.info("the swarm hears this node again")
            self.status = replace(self.status, trouble=trouble)

    async def _find_trouble(self) -> str:
        """One line for the operator, or nothing. Joins again when contacts are missing or nobody has the record."""
        peer = self._peer
        offset = await measure(peer)  # nodes that don't answer are forgotten
        self.status = replace(self.status, clock_offset_seconds=offset)
        before = peer.known_peers()
        try:
            await peer.remember()
            await peer.join()
        except PeerUnreachable as error:
            self.status = replace(self.status, heard=None)
            return f"off the network: {error}"
        except InitialPeersUnreachable as error:
            self.status = replace(self.status, heard=None)
            return f"cut off from the swarm: {error}"
        if peer.known_peers() - before:
            logger.info("met %d more nodes; announcing to them", len(peer.known_peers() - before))
            await self._announce()
        heard = await self._is_heard()
        if heard is False:
            await peer.look_around()
            await self._announce()
            heard = await self._is_heard()
        self.status = replace(self.status, heard=heard)
        if heard is False:
            return "no other node returns this node's announcement; it is sent again every few seconds"
        if offset is not None and abs(offset) > MAX_CLOCK_OFFSET_SECONDS:
            return str(ClockSkewed(offset, MAX_CLOCK_OFFSET_SECONDS))
        return ""

    async def _is_heard(self) -> bool | None:
        if not self._announced:
            return None
        artifact_id, segment = min(self._announced)
        return await self._peer.table.others_hold(segment_key(artifact_id, segment))

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            pass


def _is_urgent(before: SpanRecord | None, after: SpanRecord) -> bool:
    """What decides whether and how others route to this node."""
    return before is None or _essence(before) != _essence(after)


def _essence(record: SpanRecord) -> tuple[object, ...]:
    return (record.artifact_id, record.first, record.last, record.state, record.addresses, record.numerics_id)

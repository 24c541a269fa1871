"""Looks out, beside a running answer, for a hop that is so slow that another peer should take its seat."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dht.record import SpanRecord
from swarm.client.artifact_cache import Source
from swarm.client.blame import Avoided
from swarm.client.chain import ChainSession, StepAnswer, StepRequest
from swarm.client.config import Timeouts
from swarm.client.info import InfoReader
from swarm.client.pace import Ahead, Candidate, Look, Move, Pace, Seated, Waiting, step_times
from swarm.client.recovery import Records, Swarm
from swarm.errors import NetworkError, PeerFailed, SwarmError
from swarm.ids import PeerId
from swarm.protocol import pb
from swarm.routing import sort_records

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at what has been measured
REFRESH_SECONDS = 20.0  # between two looks at the swarm's records: nodes announce as often
PROBED_SECONDS = 30.0  # that a probe, or that one failed, counts
MOST_PROBES = 3  # for one move


class Watched(Protocol):
    """What is looked at; ``LastingSession`` has it."""

    @property
    def chain(self) -> ChainSession: ...

    @property
    def held_tokens(self) -> int: ...

    async def replace(self, index: int, reason: str, by: PeerId | None = None) -> bool: ...


@dataclass(frozen=True)
class _Probe:
    """A peer was asked: its round trip and steps waiting; None: it is not to be had."""

    at: float
    round_trip_seconds: float | None = None
    queue: int = 0


class Scout:
    """Of one session, from ``watch`` to ``close``. A peer that is left is not blamed for anything."""

    def __init__(
        self,
        swarm: Swarm,
        avoided: Avoided,
        timeouts: Timeouts,
        on_status: Callable[[str], None] = logger.info,
    ) -> None:
        self._swarm = swarm
        self._avoided = avoided
        self._status = on_status
        quick = min(timeouts.connect_seconds, timeouts.heartbeat_seconds)  # one that takes longer is no better
        self._reader = InfoReader(swarm.network, replace(timeouts, connect_seconds=quick, metadata_seconds=quick))
        self._pace = Pace()
        self._waiting = Waiting()
        self._probes: dict[PeerId, _Probe] = {}
        self._refreshed = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def watch(self, session: Watched) -> None:
        self._task = asyncio.create_task(self._run(session), name="chain session")

    async def close(self) -> None:
        """A move that is under way is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def note(self, chain: ChainSession, request: StepRequest, answer: StepAnswer) -> None:
        """A step was answered by ``chain``. One that waited for a replay says nothing about the next ones."""
        if request.kind == pb.DECODE and not any(hop.replay_us for hop in answer.trace.hops):
            peers = tuple(place.peer_id for place in chain.places)
            self._pace.note(peers, step_times(answer.trace), time.monotonic())

    # --- inside

    async def _run(self, session: Watched) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                move = await self._found(session)
                if move is not None:
                    await self._carry_out(session, move)
            except SwarmError as error:
                logger.info("no slow hop is replaced: %s", error)  # whoever awaits an answer learns it, too
                self._pace.rest(time.monotonic())

    async def _carry_out(self, session: Watched, move: Move) -> None:
        self._status(f"peer {move.leaves} is {move.reason}; it takes over")
        done = await session.replace(move.index, move.reason, move.peer_id)
        if done and move.chain_seconds is not None:
            self._pace.moved(move, time.monotonic())
        else:
            self._pace.rest(time.monotonic())

    async def _found(self, session: Watched) -> Move | None:
        """A move that fresh records and a probe agree with."""
        now = time.monotonic()
        if self._pace.typical(now) is None and not session.chain.under_way:
            return None
        move = self._best(session, self._swarm.recent())
        if now - self._refreshed < REFRESH_SECONDS and move is None:
            return None
        if self._pace.rests(now) or (self._pace.typical(now) is None and move is None):
            return None
        records = await self._look()
        for _ in range(MOST_PROBES):
            move = self._best(session, records)
            if move is None or move.peer_id in self._probes:
                return move
            await self._probe(next(record for record in records if record.peer_id == move.peer_id))
        return None

    def _best(self, session: Watched, records: Records) -> Move | None:
        chain, now = session.chain, time.monotonic()
        self._probes = {peer: probe for peer, probe in self._probes.items() if now - probe.at < PROBED_SECONDS}
        seats = [
            Seated(hop.place.peer_id, hop.place.layers, hop.numerics_id, hop.clock.round_trip_seconds)
            for hop in chain.hops
        ]
        look = self._swarm_of(seats, records, chain)
        ends = [request.start + len(request.tokens) for request in chain.under_way]
        positions = [hop.position for hop in chain.hops]
        self._waiting.look(tuple(seat.peer_id for seat in seats), positions, min(ends, default=None), now)
        ahead = Ahead(session.held_tokens, chain.terms.context_tokens - session.held_tokens)
        move = self._pace.move(seats, look, ahead, now)
        if move is None and not self._pace.rests(now):
            move = self._waiting.move(seats, look.candidates, max(ends, default=0), now)
        return move

    def _swarm_of(self, seats: Sequence[Seated], records: Records, chain: ChainSession) -> Look:
        request = replace(self._swarm.request, context_tokens=chain.terms.context_tokens, banned=self._avoided.now())
        seated = {seat.peer_id for seat in seats}
        usable = [record for record in sort_records(records, request)[0] if PeerId(record.peer_id) not in seated]
        candidates = (self._candidate(record) for record in usable)
        mine = {record.peer_id: record for record in records if PeerId(record.peer_id) in seated}
        return Look(mine, [one for one in candidates if one is not None])

    def _candidate(self, record: SpanRecord) -> Candidate | None:
        probe = self._probes.get(PeerId(record.peer_id))
        if probe is None:
            return Candidate(record)
        if probe.round_trip_seconds is None:
            return None
        return Candidate(record.model_copy(update={"queue": probe.queue}), probe.round_trip_seconds)

    async def _look(self) -> Records:
        self._refreshed = time.monotonic()
        try:
            return await self._swarm.look()
        except NetworkError as error:
            logger.info("the swarm can't be asked for faster peers: %s", error)
            return ()

    async def _probe(self, record: SpanRecord) -> None:
        """Whether the peer answers, how far away it is and what waits there."""
        peer = PeerId(record.peer_id)
        try:
            said, seconds = await self._reader.probe(Source(peer, record.addresses))
        except PeerFailed as error:
            logger.info("%s", error)
            self._probes[peer] = _Probe(time.monotonic())
            return
        is_there = said.state == pb.ONLINE
        self._probes[peer] = _Probe(time.monotonic(), seconds if is_there else None, said.queue)

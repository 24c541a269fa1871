"""The two ways to meet a death: go on where the session was, or throw it away and begin again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.failover.stage import Stage
from swarm.client import SwarmClient
from swarm.client.steps import StepSession
from swarm.errors import PeerFailed
from swarm.protocol.limits import STATE_BLOCK_TOKENS

RECOVERY, RESTART, STANDBY = "recovery", "restart", "standby"
COPY_SECONDS = 120.0
POLL_SECONDS = 0.05


async def _always(_session: StepSession, _position: int) -> None:
    """Nothing is prepared."""


@dataclass(frozen=True)
class Contender:
    """``open`` takes the session's tokens, ``ready`` waits until a death at a position finds all prepared.
    ``begins_again``: whether a failure ends its session."""

    name: str
    open: Callable[[int], Awaitable[StepSession]]
    blame: Callable[[PeerFailed], None] = lambda _: None
    begins_again: bool = False
    ready: Callable[[StepSession, int], Awaitable[None]] = _always


def recovery(stage: Stage) -> Contender:
    return Contender(RECOVERY, stage.client.open_session)


def restart(stage: Stage) -> Contender:
    return Contender(RESTART, stage.restarting.open, stage.restarting.blame, begins_again=True)


def standing_by(client: SwarmClient) -> Contender:
    """Keeps a copy of every hop's finished blocks on another node."""
    return Contender(STANDBY, client.open_session, ready=_copied)


async def _copied(session: StepSession, position: int) -> None:
    async with asyncio.timeout(COPY_SECONDS):
        while _least_copied(session) < position - position % STATE_BLOCK_TOKENS:  # noqa: ASYNC110 (by other processes)
            await asyncio.sleep(POLL_SECONDS)


def _least_copied(session: StepSession) -> int:
    """Of any hop; -1 as long as one of them has no understudy. No user of a session needs to know."""
    understudies = session._recovery.understudies  # type: ignore[attr-defined]
    found = [understudies.of(place.peer_id) for place in session.places]
    return min((one.copied_tokens for of_hop in found for one in of_hop), default=-1) if all(found) else -1

"""The two ways to meet a death: go on where the session was, or throw it away and begin again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.failover.stage import Stage
from swarm.client import SwarmClient
from swarm.client.steps import StepSession
from swarm.errors import PeerFailed

RECOVERY, RESTART, STANDBY = "recovery", "restart", "standby"


@dataclass(frozen=True)
class Contender:
    """``open`` takes the session's tokens. ``begins_again``: whether a failure ends its session."""

    name: str
    open: Callable[[int], Awaitable[StepSession]]
    blame: Callable[[PeerFailed], None] = lambda _: None
    begins_again: bool = False


def recovery(stage: Stage) -> Contender:
    return Contender(RECOVERY, stage.client.open_session)


def restart(stage: Stage) -> Contender:
    return Contender(RESTART, stage.restarting.open, stage.restarting.blame, begins_again=True)


def standing_by(client: SwarmClient) -> Contender:
    return Contender(STANDBY, client.open_session)

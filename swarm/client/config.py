"""What a client may wait for, and how it behaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

MAX_PREFILL_WINDOW = 64


@dataclass(frozen=True)
class Timeouts:
    """Seconds by phase.

    A hop that is silent for ``heartbeat_seconds`` is dead, however long a step may take: nodes answer heartbeats while
    they compute, and any byte counts as life. ``step_seconds`` bounds a chain that lives but makes no progress.
    """

    connect_seconds: float = 10.0  # one stream to one peer
    open_seconds: float = 15.0  # from Open to Opened, or from Attach to Attached
    step_seconds: float = 600.0  # from a step's last byte to its answer
    heartbeat_interval_seconds: float = 1.0
    heartbeat_seconds: float = 5.0  # silence that counts as death
    metadata_seconds: float = 30.0  # between two parts of a manifest or header
    route_seconds: float = 5.0  # for records to appear and for a slot to become free
    session_seconds: float | None = None  # a whole answer; None: no limit
    recover_seconds: float = 60.0  # for somebody to take the layers of a hop that was lost
    hand_over_seconds: float = 10.0  # an answer may wait for the last of what a leaving hop holds to be copied

    def impatient(self) -> Timeouts:
        """For peers that others can stand in for: one that says nothing is no help."""
        return replace(
            self,
            connect_seconds=min(self.connect_seconds, self.heartbeat_seconds),
            open_seconds=min(self.open_seconds, 2 * self.heartbeat_seconds),
        )


@dataclass(frozen=True)
class ClientConfig:
    """Settings of a ``SwarmClient``. ``cache_dir`` None means the user's cache directory.

    With ``standby`` each hop of a session has, where that is possible, an understudy on another node that runs the same
    layers with the same numerics: finished blocks of 512 tokens are copied to it, and it goes on when the hop is lost.
    It books a slot there, but never a node's last free one.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    cache_dir: Path | None = None
    prefill_window: int = 4  # prefill chunks on their way at once
    clock: Callable[[], float] = time.time  # what records expire by
    keep_sessions: int = 0  # left open after an answer, for one that goes on from it; each takes a slot of every hop
    keep_seconds: float = 600.0  # that such a session waits
    standby: bool = False
    leave_slow: bool = True  # replace a hop when another peer would be clearly faster for the rest of an answer
    purpose: str = "client"  # shown to the operators of the nodes

    def __post_init__(self) -> None:
        if self.keep_sessions < 0:
            raise ValueError(f"keep_sessions must be 0 or more, not {self.keep_sessions}")
        if not 1 <= self.prefill_window <= MAX_PREFILL_WINDOW:
            raise ValueError(f"prefill_window must be 1 to {MAX_PREFILL_WINDOW}, not {self.prefill_window}")

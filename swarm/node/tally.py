"""What a node has done so far. Plain numbers that only grow, so that counting costs the same for every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.histogram import POWERS_OF_TWO, SECONDS, Histogram
from swarm.node.speed import LiveSpeed
from swarm.protocol import CONTROL_STREAM, DATA_STREAM, INFO_STREAM, STATE_STREAM, Meter, pb

PREFILL, DECODE, REPLAY = "prefill", "decode", "replay"
KINDS = (PREFILL, DECODE, REPLAY)


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _counts() -> Histogram:
    return Histogram(POWERS_OF_TWO)


@dataclass(eq=False)
class Tally:
    """Of one node. ``failures`` are refusals by the name of their code, and oddities that the handlers count by names
    of their own; ``failed_steps`` the codes that clients were told of a step."""

    failures: Counter[str] = field(default_factory=Counter)
    failed_steps: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)  # computed, by kind
    sessions: int = 0  # opened
    unused: Counter[str] = field(default_factory=Counter)  # sessions that were ended for computing nothing, by why
    call_rows: Histogram = field(default_factory=_counts)
    call_sessions: Histogram = field(default_factory=_counts)
    compute: Histogram = field(default_factory=_seconds)  # of an engine call
    ipc: Histogram = field(default_factory=_seconds)
    queue: Histogram = field(default_factory=_seconds)  # of a step
    decoding: Histogram = field(default_factory=_seconds)
    speed: LiveSpeed = field(default_factory=LiveSpeed)
    streams: dict[str, Meter] = field(
        default_factory=lambda: {kind: Meter() for kind in (INFO_STREAM, CONTROL_STREAM, DATA_STREAM, STATE_STREAM)}
    )

    def called(
        self, steps: Iterable[pb.Step], rows: int, n_layers: int, compute_seconds: float, ipc_seconds: float
    ) -> None:
        """The engine has computed ``steps`` in one call."""
        sessions = 0
        kinds = set()
        for step in steps:
            sessions += 1
            kind = _kind(step)
            kinds.add(kind)
            self.tokens[kind] += step.n_tokens
        if kinds == {DECODE}:
            self.speed.decoded(n_layers, compute_seconds)
        elif kinds == {PREFILL}:
            self.speed.prefilled(rows, n_layers, compute_seconds)
        self.call_rows.observe(rows)
        self.call_sessions.observe(sessions)
        self.compute.observe(compute_seconds)
        self.ipc.observe(ipc_seconds)

    def passed(self, timing: pb.HopTiming) -> None:
        """A computed step leaves the hop; its timing holds no encoding yet."""
        self.queue.observe(timing.queue_us / 1e6)
        self.decoding.observe(timing.serialise_us / 1e6)


def _kind(step: pb.Step) -> str:
    if step.replay:
        return REPLAY
    return PREFILL if step.kind == pb.PREFILL else DECODE

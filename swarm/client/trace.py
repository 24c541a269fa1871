"""Where the time of a step went, hop by hop, on the client's own clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.ids import PeerId
from swarm.protocol import pb


class ClockOffset:
    """The difference between a hop's monotonic clock and this one, from round trips as in NTP.

    The sample with the shortest round trip wins: half of it bounds its error. A sample is forgotten slowly, so that
    drifting clocks don't leave an old one in charge.
    """

    GROWTH = 1.02  # per sample, on the remembered round trip

    def __init__(self) -> None:
        self._offset_us = 0
        self._round_trip_us: float | None = None

    def add(self, sent_us: int, theirs_us: int, received_us: int) -> None:
        round_trip = received_us - sent_us
        if self._round_trip_us is not None:
            self._round_trip_us *= self.GROWTH
        if self._round_trip_us is None or round_trip <= self._round_trip_us:
            self._round_trip_us = round_trip
            self._offset_us = theirs_us - (sent_us + received_us) // 2

    @property
    def round_trip_seconds(self) -> float | None:
        return None if self._round_trip_us is None else self._round_trip_us / 1e6

    def to_ours(self, theirs_us: int) -> int:
        return theirs_us - self._offset_us


@dataclass(frozen=True)
class HopTrace:
    """One hop's share of a step. Times are microseconds since the client sent the step; ``network_us`` is the way from
    the sender before to this hop."""

    peer_id: PeerId
    layers: tuple[int, int]
    received_us: int
    sent_us: int
    network_us: int
    queue_us: int
    compute_us: int
    serialise_us: int
    ipc_us: int
    batch_rows: int
    batch_sessions: int
    replay_us: int = 0  # inside engine calls for steps that were replayed before this one; no part of this step


@dataclass(frozen=True)
class StepTrace:
    """A step from the client's send to its answer. ``return_us`` is the way back from the exit."""

    step: int
    start: int
    n_tokens: int
    total_us: int
    return_us: int
    hops: tuple[HopTrace, ...]


@dataclass(frozen=True)
class RecoveryTrace:
    """One pause in an answer: who was lost or replaced, who came, and where the time went.

    ``silent_seconds`` passed between the last byte of the first hop lost and its loss being noticed; a hop that says
    nothing may have died at any time since. ``planning_seconds`` until all hops were under a new route,
    ``replay_seconds`` from there to the next answer.

    Of both, ``recompute_seconds`` were spent inside the engine of the hop that had the most to compute again, as told
    with the next answer. The largest and not the sum: what is replayed flows through the hops, which compute parts of
    it at the same time. The pause without it is never less than what else the pause holds.
    """

    position: int  # tokens of the session whose answers had come
    lost: tuple[tuple[PeerId, tuple[int, int]], ...]
    came: tuple[tuple[PeerId, tuple[int, int]], ...]
    story: tuple[str, ...]
    silent_seconds: float
    planning_seconds: float
    replay_seconds: float
    attempts: int
    voluntary: bool = False  # a hop that was well was replaced
    copied_tokens: int | None = None  # that understudies held when they took over: the least of any; None: nobody did
    replayed_tokens: int = 0  # that some hop computed again, or was given from a journal
    recompute_seconds: float = 0.0

    @property
    def pause_seconds(self) -> float:
        """From the first failure that was noticed to the next answer."""
        return self.planning_seconds + self.replay_seconds

    def __str__(self) -> str:
        """One line for the operator."""
        came = ", ".join(f"{first}:{last} by {peer}" for peer, (first, last) in self.came)
        silent = "" if self.voluntary else f", last byte of the lost {self.silent_seconds:.2f} s before"
        what = "handed over" if self.voluntary else "recovered"
        copied = "" if self.copied_tokens is None else f"{self.copied_tokens} tokens copied before, "
        took = f"new route {self.planning_seconds:.2f} s, replay {self.replay_seconds:.2f} s"
        return (
            f"{what} at position {self.position} in {self.pause_seconds:.2f} s ({took}, "
            f"{self.recompute_seconds:.2f} s computed again, attempts {self.attempts}{silent}): "
            f"{', '.join(self.story)}; taken over: {came or 'nothing, the same hops went on'}; "
            f"{copied}{self.replayed_tokens} replayed"
        )


@dataclass(frozen=True)
class TracedHop:
    """What ``trace_step`` must know of a hop."""

    peer_id: PeerId
    layers: tuple[int, int]
    clock: ClockOffset


def trace_step(
    answer: pb.Answer, hops: Sequence[TracedHop], start: int, n_tokens: int, sent_us: int, answered_us: int
) -> StepTrace:
    """Maps the hops' clocks to ours. Clock errors may not make a way shorter than nothing: those are cut at zero."""
    traces = []
    left_us = sent_us
    for timing in sorted(answer.timings, key=lambda timing: timing.hop_index):
        if timing.hop_index >= len(hops):
            continue
        hop = hops[timing.hop_index]
        received, sent = hop.clock.to_ours(timing.received_us), hop.clock.to_ours(timing.sent_us)
        traces.append(
            HopTrace(
                peer_id=hop.peer_id,
                layers=hop.layers,
                received_us=received - sent_us,
                sent_us=sent - sent_us,
                network_us=max(received - left_us, 0),
                queue_us=timing.queue_us,
                compute_us=timing.compute_us,
                serialise_us=timing.serialise_us,
                ipc_us=timing.ipc_us,
                batch_rows=timing.batch_rows,
                batch_sessions=timing.batch_sessions,
                replay_us=timing.replay_us,
            )
        )
        left_us = sent
    return StepTrace(answer.step, start, n_tokens, answered_us - sent_us, max(answered_us - left_us, 0), tuple(traces))


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile, in milliseconds."""

    p50_ms: float
    p95_ms: float

    @staticmethod
    def of_us(values: Iterable[int]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return Spread(0.0, 0.0)
        return Spread(_quantile(ordered, 0.5) / 1000, _quantile(ordered, 0.95) / 1000)


@dataclass(frozen=True)
class HopSummary:
    peer_id: PeerId
    layers: tuple[int, int]
    queue: Spread
    compute: Spread
    serialise: Spread
    ipc: Spread
    network: Spread


def summarise(steps: Sequence[StepTrace]) -> tuple[HopSummary, ...]:
    """Per hop over ``steps``, in chain order."""
    places: dict[tuple[PeerId, tuple[int, int]], list[HopTrace]] = {}
    for step in steps:
        for hop in step.hops:
            places.setdefault((hop.peer_id, hop.layers), []).append(hop)
    return tuple(
        HopSummary(
            peer_id=peer_id,
            layers=layers,
            queue=Spread.of_us(hop.queue_us for hop in hops),
            compute=Spread.of_us(hop.compute_us for hop in hops),
            serialise=Spread.of_us(hop.serialise_us for hop in hops),
            ipc=Spread.of_us(hop.ipc_us for hop in hops),
            network=Spread.of_us(hop.network_us for hop in hops),
        )
        for (peer_id, layers), hops in sorted(places.items(), key=lambda place: place[0][1])
    )


def _quantile(ordered: Sequence[int], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

"""Whether a hop is so slow that another peer should take its seat. Pure: clock, records and probes are the caller's.

The idea is rent or buy. Nobody knows how long an answer will be, so it is taken to go on for as long again as it has
gone on, and a hop is replaced when what that saves pays twice for what the move replays: however the answer ends, at
most about as much is lost as a move costs. What a hop takes is measured, what others would take is only promised by
their records and a probe. So a promise is believed when it is twice as good, scaled by how far the other hops are from
their own promises, and a peer that has served here is judged by what it showed, not by what it says.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dht.record import SpanRecord
from swarm.client.trace import StepTrace
from swarm.ids import PeerId
from swarm.routing import DEFAULT_RTT_SECONDS, HOP_SECONDS

WINDOW_SECONDS = 4.0  # what passes sooner is a hiccup: a neighbour's prompt, a busy disk, this very program
STALE_SECONDS = 60.0  # a session that computes nothing says nothing
LEAST_STEPS = 8
MOST_STEPS = 1024  # a chain that makes them within the window is fast enough
CALM = 0.25  # the quantile that speaks for a window: three of four steps must be slow
RATIO = 2.0  # speeds are announced by idle nodes, and most ways between peers are not measured at all
REPLAY_MARGIN = 2.0  # announced prefill speeds are those of idle nodes, too, and what is replayed has to travel
MOVE_SECONDS = 2.0  # a new route, and what a move may go wrong
LEAST_TOKENS = 64  # that an answer is expected to go on for at least
EDGE_SECONDS = DEFAULT_RTT_SECONDS / 2  # a way between two peers is not expected to be faster than usual
FIRST_REST_SECONDS = 30.0  # after a move; several windows, so that its effect is known before the next one
LONGEST_REST_SECONDS = 600.0
BETTER = 0.8  # of the time of a token before: what a move has to reach, or the next one has to wait longer
REMEMBERED_SECONDS = 600.0  # that a peer is judged by what it took here
ABSURD_SECONDS = 20.0  # a step that waits so long for one hop ...
ABSURD = 4.0  # ... and that many times longer than for any other, or than another would take for all there is


@dataclass(frozen=True)
class StepTimes:
    """One decode step in seconds: the ways from the client through the hops and back (one more than hops), and what
    passed inside each hop."""

    edges: tuple[float, ...]
    services: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.edges) + sum(self.services)

    def seat(self, index: int) -> float:
        """With the ways to the hop and from it: which end of a slow way is to blame shows when both its ways are."""
        return self.edges[index] + self.services[index] + self.edges[index + 1]


@dataclass(frozen=True)
class Seated:
    """A hop. The round trip is between it and the client; None: not known."""

    peer_id: PeerId
    layers: tuple[int, int]
    numerics_id: str
    round_trip_seconds: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A peer that could take a seat. Without a probe it is taken to be next door."""

    record: SpanRecord
    round_trip_seconds: float | None = None

    def could_take(self, seat: Seated) -> bool:
        record, (first, last) = self.record, seat.layers
        return record.first <= first and last <= record.last and record.numerics_id == seat.numerics_id

    def decode_seconds(self, layers: tuple[int, int]) -> float | None:
        """Of one token, behind the steps that wait there. None: the peer has not measured it."""
        record = self.record
        if record.decode_tokens_per_second <= 0:
            return None
        span_seconds = 1 / record.decode_tokens_per_second
        return span_seconds * (self._share(layers) + record.queue) + HOP_SECONDS

    def prefill_seconds(self, layers: tuple[int, int], n_tokens: int) -> float:
        """As fast as it decodes, when it has not measured that."""
        speed = self.record.prefill_tokens_per_second or self.record.decode_tokens_per_second
        return n_tokens * self._share(layers) / speed if speed > 0 else float("inf")

    def _share(self, layers: tuple[int, int]) -> float:
        return (layers[1] - layers[0]) / max(self.record.last - self.record.first, 1)


@dataclass(frozen=True)
class Look:
    """What the swarm says: records of those who sit, by peer, and others who might."""

    seated: Mapping[str, SpanRecord]
    candidates: Sequence[Candidate]


@dataclass(frozen=True)
class Ahead:
    """What a session has before it: tokens it holds, and tokens it may still compute."""

    position: int
    left: int


@dataclass(frozen=True)
class Move:
    """``peer_id`` shall take seat ``index`` from ``leaves``. Of what is compared, ``taken_seconds`` are measured there
    and ``promised_seconds`` expected; ``chain_seconds`` takes a token now, when that is known."""

    index: int
    leaves: PeerId
    peer_id: PeerId
    taken_seconds: float
    promised_seconds: float
    saved_seconds: float = 0.0
    chain_seconds: float | None = None

    @property
    def reason(self) -> str:
        """Words that follow ``peer X was``."""
        if self.chain_seconds is None:
            taken, promised = f"a step waits {self.taken_seconds:.0f} s for it", f"{self.promised_seconds:.1f} s"
        else:
            taken, promised = f"{self.taken_seconds * 1e3:.0f} ms a token", f"{self.promised_seconds * 1e3:.0f} ms"
        return f"slow: {taken}, peer {self.peer_id} promises {promised}"


def step_times(trace: StepTrace) -> StepTimes:
    inside = (hop.queue_us + hop.compute_us + hop.serialise_us + hop.ipc_us for hop in trace.hops)
    edges = (*(hop.network_us for hop in trace.hops), trace.return_us)
    return StepTimes(tuple(edge / 1e6 for edge in edges), tuple(service / 1e6 for service in inside))


class Pace:
    """Of one session: its decode steps, and what has become of its moves."""

    def __init__(self) -> None:
        self.decoded = 0
        self._chain: tuple[PeerId, ...] = ()
        self._steps: deque[tuple[float, StepTimes]] = deque(maxlen=MOST_STEPS)  # with the time each began
        self._latest = 0.0
        self._best: StepTimes | None = None  # of this chain's windows, each part by itself
        self._shown: dict[PeerId, tuple[float, float]] = {}  # seconds of a token at a peer's seat, and when
        self._rest_until = 0.0
        self._rest_seconds = FIRST_REST_SECONDS
        self._moved: tuple[float, float] | None = None  # when, and seconds of a token before; until that is judged

    def note(self, chain: tuple[PeerId, ...], times: StepTimes, now: float) -> None:
        """A decode step has been answered. Steps of another chain say nothing about this one."""
        if len(times.services) != len(chain):
            return
        if chain != self._chain:
            self._chain, self._best = chain, None
            self._steps.clear()
        self._steps.append((now - times.total, times))
        self._latest = now
        self.decoded += 1

    def typical(self, now: float) -> StepTimes | None:
        """What steps take of late; None while too few are known."""
        window: list[StepTimes] = []
        if not self._steps or now - self._latest > STALE_SECONDS:
            return None
        for began, times in reversed(self._steps):
            window.append(times)
            if len(window) >= LEAST_STEPS and now - began >= WINDOW_SECONDS:
                return StepTimes(_calm(step.edges for step in window), _calm(step.services for step in window))
        return None

    def move(self, seats: Sequence[Seated], look: Look, ahead: Ahead, now: float) -> Move | None:
        """The move that saves most, if there is one worth it."""
        times = self.typical(now)
        if times is None or tuple(seat.peer_id for seat in seats) != self._chain:
            return None
        self._judge(times)
        self._best = times if self._best is None else _least(self._best, times)
        if self.rests(now):
            return None
        view = _View(seats, times, self._best, look.seated)
        possible = (
            self._weighed(view, index, candidate, ahead, now)
            for index, seat in enumerate(seats)
            for candidate in look.candidates
            if candidate.could_take(seat)
        )
        return max((move for move in possible if move), key=lambda move: move.saved_seconds, default=None)

    def moved(self, move: Move, now: float) -> None:
        """It was done: the next one waits until it is known whether this one helped, and longer when it did not."""
        self._shown[move.leaves] = (move.taken_seconds, now)
        self._moved = None if move.chain_seconds is None else (now, move.chain_seconds)
        self._rest_until = now + self._rest_seconds

    def rest(self, now: float) -> None:
        """It was not done, or nobody will know whether it helped: not again at once, and later each time."""
        self._rest_until = now + self._rest_seconds
        self._rest_seconds = min(2 * self._rest_seconds, LONGEST_REST_SECONDS)

    def rests(self, now: float) -> bool:
        return now < self._rest_until

    def _judge(self, times: StepTimes) -> None:
        if self._moved is None:
            return
        (at, before), self._moved = self._moved, None
        if times.total <= BETTER * before:
            self._rest_seconds = FIRST_REST_SECONDS
        else:
            self._rest_seconds = min(2 * self._rest_seconds, LONGEST_REST_SECONDS)
            self._rest_until = at + self._rest_seconds

    def _weighed(self, view: _View, index: int, candidate: Candidate, ahead: Ahead, now: float) -> Move | None:
        seat, taken = view.seats[index], view.times.seat(index)
        promised = view.promise(index, candidate)
        if promised is None:
            return None
        peer = PeerId(candidate.record.peer_id)
        shown, at = self._shown.get(peer, (0.0, -REMEMBERED_SECONDS))
        if now - at < REMEMBERED_SECONDS:
            promised = max(promised, shown)
        tokens = min(ahead.left, max(LEAST_TOKENS, self.decoded))
        replay = view.load(index) * candidate.prefill_seconds(seat.layers, ahead.position)
        saved = (taken - promised) * tokens - MOVE_SECONDS - REPLAY_MARGIN * replay
        if taken < RATIO * promised or saved <= 0:
            return None
        return Move(index, seat.peer_id, peer, taken, promised, saved, view.times.total)


@dataclass(frozen=True)
class _View:
    """A chain as it is, and what it would be with another peer in one seat. ``best`` is what each part took in its
    fastest window."""

    seats: Sequence[Seated]
    times: StepTimes
    best: StepTimes
    records: Mapping[str, SpanRecord]

    def promise(self, index: int, candidate: Candidate) -> float | None:
        """Seconds of a token at the seat, its ways included; None when the peer promises nothing."""
        inside = candidate.decode_seconds(self.seats[index].layers)
        if inside is None:
            return None
        return self.load(index) * inside + sum(self._way(edge, index, candidate) for edge in (index, index + 1))

    def load(self, index: int) -> float:
        """How much longer the other hops take than they promise: a long context, busy machines, or one machine for all
        slow each of them."""
        factors = []
        for at, seat in enumerate(self.seats):
            record = self.records.get(seat.peer_id)
            promised = Candidate(record).decode_seconds(seat.layers) if record is not None and at != index else None
            if promised is not None:
                factors.append(self.times.services[at] / promised)
        return max(1.0, statistics.median(factors)) if factors else 1.0

    def _way(self, edge: int, index: int, candidate: Candidate) -> float:
        """What a way of the seat would take: not less than others do."""
        edges, last = self.times.edges, len(self.seats)
        half = (candidate.round_trip_seconds or 0.0) / 2
        own_other, their_other = self._other_ways(edge, index)
        if edges[their_other] > RATIO * max(edges[own_other], EDGE_SECONDS):
            return edges[edge]  # the peer or client at its other end is to blame: its other way is slow, too
        if edge in (0, last):
            # the client's own link is part of it, and of the other way that ends at the client, and of a probe
            usual = self.best.edges[edge] if last == 1 else min(edges[edge], edges[last - edge])
            return max(half, usual)
        apart = [edges[at] for at in range(last + 1) if at not in (index, index + 1)]
        usual = min(edges[edge], max(EDGE_SECONDS, statistics.median_low(apart)))
        return usual + max(0.0, half - self._nearest() / 2)

    def _other_ways(self, edge: int, index: int) -> tuple[int, int]:
        """The seat's other way, and the other way of whom ``edge`` leads to; the client has the first and the last."""
        last = len(self.seats)
        own, step = (edge + 1, -1) if edge == index else (edge - 1, 1)
        return own, (edge + step) % (last + 1)

    def _nearest(self) -> float:
        """The round trip to the nearest hop: this client's own link adds no more to each probe."""
        trips = [seat.round_trip_seconds for seat in self.seats if seat.round_trip_seconds is not None]
        return min(trips, default=0.0)


class Waiting:
    """How long the oldest step under way waits for which hop, as heartbeats tell."""

    def __init__(self) -> None:
        self._chain: tuple[PeerId, ...] = ()
        self._at: tuple[int, int] | None = None  # hop, and end of the step
        self._since = 0.0
        self._longest: dict[int, float] = {}  # waits that are over, by hop

    def look(self, chain: tuple[PeerId, ...], positions: Sequence[int], end: int | None, now: float) -> int | None:
        """The hop that holds the step up; ``end`` None: nothing is under way. Call it about once a second."""
        if chain != self._chain:
            self._chain, self._at, self._longest = chain, None, {}
        stuck = None if end is None else next((at for at, held in enumerate(positions) if held < end), None)
        at = None if stuck is None or end is None else (stuck, end)
        if at != self._at:
            if self._at is not None:
                hop = self._at[0]
                self._longest[hop] = max(self._longest.get(hop, 0.0), now - self._since)
            self._at, self._since = at, now
        return stuck

    def move(self, seats: Sequence[Seated], candidates: Sequence[Candidate], n_tokens: int, now: float) -> Move | None:
        """Who would compute all ``n_tokens`` of the session far sooner than the step has waited already, which is more
        than any ever waited for another hop."""
        if self._at is None or tuple(seat.peer_id for seat in seats) != self._chain:
            return None
        index, waited = self._at[0], now - self._since
        others = max((longest for hop, longest in self._longest.items() if hop != index), default=0.0)
        seat = seats[index]
        takes = {
            PeerId(one.record.peer_id): MOVE_SECONDS + REPLAY_MARGIN * one.prefill_seconds(seat.layers, n_tokens)
            for one in candidates
            if one.could_take(seat)
        }
        if not takes or waited < max(ABSURD_SECONDS, ABSURD * others):
            return None
        peer, seconds = min(takes.items(), key=lambda take: take[1])
        return Move(index, seat.peer_id, peer, waited, seconds) if waited >= ABSURD * seconds else None


def _calm(columns: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """Part by part, what three of four steps took at least."""
    return tuple(sorted(part)[int(CALM * len(part))] for part in zip(*columns, strict=True))


def _least(a: StepTimes, b: StepTimes) -> StepTimes:
    return StepTimes(tuple(map(min, a.edges, b.edges)), tuple(map(min, a.services, b.services)))

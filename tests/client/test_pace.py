"""When a slow hop is worth a move: on chains, records and clocks that are made up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.record import NodeState, SlotClass, SpanRecord
from swarm.client.pace import (
    ABSURD_SECONDS,
    FIRST_REST_SECONDS,
    Ahead,
    Candidate,
    Look,
    Move,
    Pace,
    Seated,
    StepTimes,
    Waiting,
    step_times,
)
from swarm.client.trace import HopTrace, StepTrace
from swarm.ids import PeerId

AHEAD = Ahead(position=100, left=1000)
LAYERS = 10  # of each hop
FAST = 0.001


def record(peer: str, seat: int, ms: float = 20.0, prefill: float = 1000.0, numerics: str = "n") -> SpanRecord:
    """Of a peer that promises ``ms`` a token for the layers of a seat."""
    return SpanRecord(
        peer_id=peer,
        artifact_id="0" * 64,
        n_layers=100,
        first=LAYERS * seat,
        last=LAYERS * (seat + 1),
        state=NodeState.ONLINE,
        protocol_version=1,
        numerics_id=numerics,
        slots=(SlotClass(tokens=4096, total=4, free=4),),
        chunk_tokens=64,
        decode_tokens_per_second=1000 / ms if ms else 0.0,
        prefill_tokens_per_second=prefill,
    )


@dataclass
class Story:
    """A chain of three hops that promise and take 20 ms, and a spare for each seat that is as good."""

    pace: Pace = field(default_factory=Pace)
    now: float = 1000.0
    chain: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    records: list[SpanRecord] = field(default_factory=lambda: [record(peer, at) for at, peer in enumerate("abc")])
    spares: list[Candidate] = field(
        default_factory=lambda: [Candidate(record(peer, at)) for at, peer in enumerate("xyz")]
    )
    round_trips: tuple[float, ...] = ()

    def run(self, seconds: float, edges: tuple[float, ...] = (FAST,) * 4, ms: tuple[float, ...] = (20, 20, 20)) -> None:
        """Answers steps for a while, which take as long as they say."""
        times = StepTimes(edges, tuple(one / 1000 for one in ms))
        until = self.now + seconds
        while self.now < until:
            self.now += times.total
            self.pace.note(tuple(map(PeerId, self.chain)), times, self.now)

    def move(self, ahead: Ahead = AHEAD) -> Move | None:
        trips = self.round_trips or (None,) * len(self.chain)
        seats = [
            Seated(PeerId(peer), (LAYERS * at, LAYERS * (at + 1)), "n", trips[at]) for at, peer in enumerate(self.chain)
        ]
        return self.pace.move(seats, Look({one.peer_id: one for one in self.records}, self.spares), ahead, self.now)

    def decided(self) -> Move:
        move = self.move()
        assert move is not None
        return move

    def carry_out(self, move: Move) -> None:
        """The one that leaves is a spare from now on."""
        self.pace.moved(move, self.now)
        self.chain[move.index] = move.peer_id
        came = next(one for one in self.spares if one.record.peer_id == move.peer_id)
        left = next(one for one in self.records if one.peer_id == move.leaves)
        self.spares[self.spares.index(came)] = Candidate(left)
        self.records[self.records.index(left)] = came.record


SLOW_LINK = {"edges": (FAST, 0.2, 0.2, FAST)}  # of the middle hop
SLOW_HOP = {"ms": (20.0, 400.0, 20.0)}


@pytest.mark.parametrize("slow", [SLOW_LINK, SLOW_HOP])
def test_a_slow_hop_is_left_for_a_faster_peer(slow: dict[str, tuple[float, ...]]) -> None:
    story = Story()
    story.run(5)
    assert story.move() is None
    story.run(20, **slow)
    move = story.move()
    assert move is not None and (move.index, move.leaves, move.peer_id) == (1, "b", "y")
    assert 0.39 < move.taken_seconds < 0.43 and 0.02 <= move.promised_seconds < 0.05


def test_the_reason_names_both_sides() -> None:
    move = Move(1, PeerId("b"), PeerId("y"), 0.41, 0.06, 100.0, 0.5)
    assert move.reason == "slow: 410 ms a token, peer y promises 60 ms"
    assert (
        Move(1, PeerId("b"), PeerId("y"), 63.2, 2.5).reason == "slow: a step waits 63 s for it, peer y promises 2.5 s"
    )


@pytest.mark.parametrize(
    "spare",
    [
        pytest.param(record("y", 0), id="other layers"),
        pytest.param(record("y", 1, numerics="m"), id="other bits"),
        pytest.param(record("y", 1, ms=0), id="promises nothing"),
        pytest.param(record("y", 1, ms=300), id="not clearly faster"),
        pytest.param(record("y", 1).model_copy(update={"queue": 40}), id="busy"),
    ],
)
def test_without_a_clearly_faster_peer_it_stays(spare: SpanRecord) -> None:
    story = Story(spares=[Candidate(spare)])
    story.run(20, **SLOW_HOP)
    assert story.move() is None


def test_a_part_of_a_bigger_span_takes_its_share() -> None:
    big = record("y", 1, ms=400).model_copy(update={"first": 0, "last": 100})
    story = Story(spares=[Candidate(big)])
    story.run(20, **SLOW_HOP)
    assert 0.04 <= story.decided().promised_seconds < 0.07


def test_a_probe_tells_of_a_far_peer() -> None:
    story = Story(round_trips=(0.002, 0.4, 0.002))
    story.run(20, **SLOW_LINK)
    assert story.move() is not None, "nobody has asked yet"
    story.spares[1] = Candidate(story.spares[1].record, round_trip_seconds=0.4)
    assert story.move() is None
    story.spares[1] = Candidate(story.spares[1].record, round_trip_seconds=0.01)
    assert story.move() is not None


def test_where_all_are_slow_nobody_is() -> None:
    """A long context, a machine that hosts them all, or other users: what every hop suffers a new one will, too."""
    story = Story()
    story.run(40, ms=(400, 450, 500))
    assert story.move() is None


def test_the_clients_own_slow_link_is_nobodys_fault() -> None:
    story = Story(round_trips=(0.4, 0.4, 0.4))
    story.run(40, edges=(0.2, FAST, FAST, 0.2))
    assert story.move() is None


@pytest.mark.parametrize(("edges", "index"), [((0.3, 0.3, FAST, FAST), 0), ((FAST, FAST, 0.3, 0.3), 2)])
def test_a_slow_link_of_the_first_or_last_hop_is_its_own(edges: tuple[float, ...], index: int) -> None:
    story = Story()
    story.run(20, edges=edges)
    assert story.decided().index == index


def test_a_neighbour_does_not_pay_for_a_slow_link() -> None:
    story = Story()
    del story.spares[1]
    story.run(20, **SLOW_LINK)
    assert story.move() is None


def test_one_step_of_four_may_be_slow() -> None:
    story = Story()
    for _ in range(60):
        story.run(0.1)
        story.run(0.4, **SLOW_HOP)
    assert story.move() is None


def test_a_hiccup_passes_and_what_lasts_counts() -> None:
    story = Story()
    story.run(10)
    story.run(2, **SLOW_HOP)
    assert story.move() is None
    story.run(4, **SLOW_HOP)
    assert story.move() is not None


def test_near_its_end_an_answer_stays_where_it_is() -> None:
    story = Story()
    story.run(20, **SLOW_HOP)
    assert story.move(Ahead(100, 5)) is None
    assert story.move(Ahead(100, 50)) is not None


def test_a_long_replay_must_have_been_earned() -> None:
    """20,000 tokens at 1,000 a second, twice for margin, cost as much as about 100 slow tokens: nobody knows whether so
    many come until as many have been."""
    story = Story()
    far = Ahead(20_000, 100_000)
    story.run(20, **SLOW_HOP)
    assert story.move(far) is None
    story.run(60, **SLOW_HOP)
    assert story.move(far) is not None


def test_a_session_that_rests_says_nothing() -> None:
    story = Story()
    story.run(20, **SLOW_HOP)
    story.now += 61
    assert story.move() is None


def test_steps_of_another_chain_do_not_count() -> None:
    story = Story()
    story.run(20, **SLOW_HOP)
    story.chain[1] = "y"
    story.spares[1] = Candidate(record("b", 1))
    assert story.move() is None
    story.run(3, **SLOW_HOP)
    assert story.move() is None


def test_a_move_that_helps_is_followed_by_another_only_after_a_rest() -> None:
    story = Story()
    slow = (20.0, 400.0, 500.0)
    story.run(20, ms=slow)
    move = story.decided()
    assert move.peer_id == "z"
    story.carry_out(move)
    story.run(20, ms=(20, 400, 20))
    assert story.move() is None
    story.run(FIRST_REST_SECONDS - 15, ms=(20, 400, 20))
    assert story.decided().peer_id == "y"


def test_after_a_move_that_did_not_help_it_rests_longer_and_does_not_go_back() -> None:
    story = Story()
    story.spares.append(Candidate(record("w", 1)))
    story.run(20, **SLOW_HOP)
    move = story.decided()
    story.carry_out(move)
    story.run(FIRST_REST_SECONDS + 5, **SLOW_HOP)
    assert story.move() is None
    story.run(FIRST_REST_SECONDS, **SLOW_HOP)
    second = story.decided()
    assert second.peer_id not in ("b", move.peer_id)
    story.carry_out(second)
    story.run(20 * FIRST_REST_SECONDS - 100, **SLOW_HOP)
    assert story.move() is None, "all three have shown what they are"


def test_what_could_not_be_done_is_not_tried_at_once() -> None:
    story = Story()
    story.run(20, **SLOW_HOP)
    story.pace.rest(story.now)
    assert story.move() is None
    story.run(FIRST_REST_SECONDS + 1, **SLOW_HOP)
    assert story.move() is not None


times = st.floats(50, 500)  # ms a token
peers = st.lists(st.tuples(times, times), min_size=2, max_size=5)  # what a peer takes, and what it promises


@settings(deadline=None, max_examples=30)
@given(peers, times, times)
def test_whatever_is_promised_it_does_not_flap(middle: list[tuple[float, float]], first: float, last: float) -> None:
    """Over less than it remembers: each peer is tried at most once for what it promises, and after each that is no
    better one is chosen for what it has shown."""
    records = [record(f"m{at}", 1, ms=promised) for at, (_, promised) in enumerate(middle)]
    story = Story(chain=["a", "m0", "c"], spares=[Candidate(one) for one in records[1:]])
    story.records = [record("a", 0, first), records[0], record("c", 2, last)]
    tried, moves, rested = {"m0"}, 0, 0.0
    while story.now < 1500:
        story.run(2.0, ms=(first, middle[int(story.chain[1][1:])][0], last))
        if (move := story.move()) is None:
            continue
        assert story.now >= rested
        assert move.peer_id not in tried or move.taken_seconds >= 2 * middle[int(move.peer_id[1:])][0] / 1000
        rested = story.now + FIRST_REST_SECONDS
        story.carry_out(move)
        tried.add(move.peer_id)
        moves += 1
    assert moves < 2 * len(middle)


# --- steps that don't end

CHAIN = (PeerId("a"), PeerId("b"), PeerId("c"))
SEATS = [Seated(peer, (LAYERS * at, LAYERS * (at + 1)), "n") for at, peer in enumerate(CHAIN)]
SPARES = [Candidate(record("y", 1))]


def test_a_step_that_waits_absurdly_long_for_one_hop() -> None:
    waiting = Waiting()
    assert waiting.look(CHAIN, (0, 0, 0), 512, 0.0) == 0
    assert waiting.look(CHAIN, (512, 0, 0), 512, 3.0) == 1
    assert waiting.move(SEATS, SPARES, 512, ABSURD_SECONDS) is None
    assert waiting.look(CHAIN, (512, 0, 0), 512, 20.0) == 1
    move = waiting.move(SEATS, SPARES, 512, 24.0)
    assert move is not None and (move.index, move.leaves, move.peer_id, move.taken_seconds) == (1, "b", "y", 21.0)
    assert waiting.move(SEATS, [], 512, 24.0) is None
    assert waiting.move(SEATS, SPARES, 20_000, 24.0) is None, "that much takes long anywhere"


def test_a_step_that_moves_on_waits_anew() -> None:
    waiting = Waiting()
    for at in range(10):
        assert waiting.look(CHAIN, (512 * at + 512, 512 * at, 0), 512 * at + 512, 10.0 * at) == 1
        assert waiting.move(SEATS, SPARES, 512, 10.0 * at + 9) is None


def test_where_other_hops_take_long_too_a_step_may_wait() -> None:
    waiting = Waiting()
    waiting.look(CHAIN, (0, 0, 0), 512, 0.0)
    waiting.look(CHAIN, (512, 0, 0), 512, 15.0)
    assert waiting.move(SEATS, SPARES, 512, 70.0) is None
    assert waiting.move(SEATS, SPARES, 512, 80.0) is not None


def test_when_nothing_is_under_way_nobody_is_waited_for() -> None:
    waiting = Waiting()
    assert waiting.look(CHAIN, (5, 5, 5), None, 0.0) is None
    assert waiting.move(SEATS, SPARES, 512, 1000.0) is None


def test_times_are_taken_from_a_trace() -> None:
    hop = HopTrace(PeerId("a"), (0, 10), 0, 0, 1_000_000, 1000, 2000, 300, 40, 1, 1)
    trace = StepTrace(1, 0, 1, 2_000_000, 500_000, (hop, hop))
    times = step_times(trace)
    assert times.edges == (1.0, 1.0, 0.5) and times.services == (0.00334, 0.00334)
    assert times.seat(1) == pytest.approx(1.50334) and times.total == pytest.approx(2.50668)

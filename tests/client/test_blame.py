"""Who is left out, for how long, and what for."""

from __future__ import annotations

import pytest

from swarm.client.blame import FIRST_BAN_SECONDS, LONGEST_BAN_SECONDS, Avoided, is_to_blame
from swarm.errors import ContextExceeded
from swarm.ids import PeerId
from swarm.protocol import StreamClosed, WireError, pb, to_swarm_error

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ban_seconds(avoided: Avoided, clock: Clock) -> float:
    began = clock.now
    while A in avoided.now():
        clock.now += 1
    return clock.now - began


def test_bans_grow_up_to_a_limit(clock: Clock) -> None:
    avoided = Avoided(clock)
    seconds = []
    for _ in range(9):
        avoided.add(A)
        seconds.append(ban_seconds(avoided, clock))
    assert seconds[:3] == [FIRST_BAN_SECONDS, 2 * FIRST_BAN_SECONDS, 4 * FIRST_BAN_SECONDS]
    assert seconds[-1] == LONGEST_BAN_SECONDS


def test_failures_of_one_cause_count_once(clock: Clock) -> None:
    avoided = Avoided(clock)
    for _ in range(5):
        avoided.add(A)
    assert ban_seconds(avoided, clock) == FIRST_BAN_SECONDS


def test_who_serves_is_forgiven(clock: Clock) -> None:
    avoided = Avoided(clock)
    avoided.add(A)
    ban_seconds(avoided, clock)
    avoided.add(A)
    avoided.add_edge(A, B)
    avoided.add_edge(B, A)
    avoided.forgive_chain([C, A, B])
    assert not avoided.now()
    assert avoided.edges() == {(B, A)}, "only the link that was used"
    avoided.add(A)
    assert ban_seconds(avoided, clock) == FIRST_BAN_SECONDS, "and begins anew"


def test_a_ban_of_long_ago_is_forgotten(clock: Clock) -> None:
    avoided = Avoided(clock)
    avoided.add(A)
    clock.now += FIRST_BAN_SECONDS + LONGEST_BAN_SECONDS
    assert not avoided.now()
    avoided.add(A)
    assert ban_seconds(avoided, clock) == FIRST_BAN_SECONDS


@pytest.mark.parametrize("code", [code for code in pb.ErrorCode.values() if code])
def test_what_a_peer_says_of_itself_is_no_blame(code: pb.ErrorCode.ValueType) -> None:
    assert not is_to_blame(to_swarm_error(pb.Error(code=code), "peer"))


def test_transport_and_nonsense_are_to_blame() -> None:
    assert is_to_blame(to_swarm_error(StreamClosed("reset"), "peer"))
    assert is_to_blame(to_swarm_error(WireError(pb.MALFORMED, "garbage"), "peer"))
    assert not is_to_blame(ContextExceeded("too long; shorten it"))

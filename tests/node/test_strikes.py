"""Who is suspected, and who is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.ids import SessionId
from swarm.node.strikes import Strike, Strikes

LIMIT = 2
CALLS = st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=4), max_size=20)


def session(number: int) -> SessionId:
    return SessionId(bytes([number]) * 16)


@given(CALLS)
def test_only_who_was_alone_is_refused_and_only_after_the_limit(calls: list[set[int]]) -> None:
    strikes = Strikes(LIMIT, remembered=100)
    for call in calls:
        strikes.add([session(number) for number in call])
    for number in range(6):
        mine = [call for call in calls if number in call]
        assert strikes.of(session(number)).engines == len(mine)
        assert strikes.suspects(session(number)) == bool(mine)
        assert strikes.refuses(session(number)) == ({number} in mine and len(mine) >= LIMIT)


def test_a_call_without_sessions_is_nobody_s() -> None:
    strikes = Strikes(LIMIT, remembered=100)
    strikes.add(())
    assert not strikes.suspects(session(0))


def test_the_oldest_are_forgotten() -> None:
    strikes = Strikes(LIMIT, remembered=2)
    for number in (0, 1, 0, 2):
        strikes.add([session(number)])
    assert [strikes.of(session(number)) for number in range(3)] == [Strike(alone=2), Strike(), Strike(alone=1)]

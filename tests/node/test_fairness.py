"""Peers under mixed load, with an engine and a clock that are numbers: nobody gets more for having more sessions,
larger chunks or other company, and nobody waits for more than was promised."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.ids import PeerId, SessionId
from swarm.node.scheduler import MAX_SHARED_ROWS, Group, Policy, Work

MAX_ROWS = 16
GROUPS = (Group(0, 0, 10), Group(1, 0, 10))

steadily = settings(deadline=None, max_examples=60)  # a busy machine is not the policy's fault


@dataclass(frozen=True)
class Client:
    """A session that always has its next step waiting."""

    peer: int
    rows: int
    chunk: bool
    group: int = 0


@dataclass
class Engine:
    """Takes calls off the policy. The clock counts them; a step waits from the call before which it became the first of
    its session."""

    policy: Policy[int] = field(default_factory=lambda: Policy[int](MAX_ROWS))
    calls: list[tuple[Work[int], ...]] = field(default_factory=list)
    since: dict[SessionId, int] = field(default_factory=dict)
    waits: list[tuple[Work[int], list[tuple[Work[int], ...]]]] = field(default_factory=list)  # and the calls before it

    def push(self, number: int, client: Client) -> None:
        session = SessionId(number.to_bytes(2, "big"))
        peer = PeerId(f"p{client.peer}")
        self.policy.push(Work(session, peer, GROUPS[client.group], client.rows, client.chunk, number))
        self.since.setdefault(session, len(self.calls))

    def call(self) -> tuple[Work[int], ...]:
        taken = self.policy.next()
        for work in taken:
            self.waits.append((work, self.calls[self.since.pop(work.session) :]))
        self.calls.append(taken)
        return taken

    def run(self, clients: list[Client], calls: int) -> None:
        """Every client's next step comes when the last one has left."""
        for number, client in enumerate(clients):
            self.push(number, client)
        for _ in range(calls):
            for work in self.call():
                self.push(work.job, clients[work.job])

    def rows_by_peer(self, *, chunk: bool) -> Counter[PeerId]:
        given: Counter[PeerId] = Counter()
        for call in self.calls:
            for work in call:
                if work.alone == chunk:
                    given[work.peer] += work.rows
        return given


CLIENTS = st.lists(
    st.builds(
        Client,
        peer=st.integers(0, 3),
        rows=st.sampled_from([1, 1, 1, 2, 5, 64, 256]),
        chunk=st.booleans(),
        group=st.integers(0, 1),
    ),
    min_size=1,
    max_size=12,
)


def fitting(clients: list[Client]) -> list[Client]:
    """As many as all rows of a group fit a call: what does not fit waits for the next turn."""
    kept: list[Client] = []
    for client in clients:
        alone = client.chunk or client.rows > MAX_SHARED_ROWS
        room = MAX_ROWS - sum(other.rows for other in kept if not other.chunk and other.group == client.group)
        if alone or client.rows <= room:
            kept.append(Client(client.peer, client.rows, alone, client.group))
    return kept


@steadily
@given(CLIENTS)
def test_a_row_waits_for_one_chunk_and_one_turn_at_most(clients: list[Client]) -> None:
    engine = Engine()
    engine.run(fitting(clients), 60)
    for work, before in engine.waits:
        if not work.alone:
            assert sum(call[0].alone for call in before) <= 1
            assert len(before) <= 1 + len(GROUPS)


@steadily
@given(CLIENTS)
def test_a_chunk_goes_after_every_turn_of_rows(clients: list[Client]) -> None:
    engine = Engine()
    clients = fitting(clients)
    engine.run(clients, 60)
    groups = len({client.group for client in clients if not client.chunk})
    kinds = "".join("c" if call[0].alone else "r" for call in engine.calls)
    if any(client.chunk for client in clients):
        assert "r" * (groups + 1) not in kinds


@steadily
@given(CLIENTS)
def test_peers_get_as_many_rows_of_chunks_however_they_are_cut(clients: list[Client]) -> None:
    """Each always has one waiting. The last chunk of either may be one more."""
    clients = [Client(client.peer, 8 * client.rows, chunk=True) for client in clients]
    engine = Engine()
    engine.run(clients, 200)
    given_rows = engine.rows_by_peer(chunk=True)
    assert set(given_rows) == {PeerId(f"p{client.peer}") for client in clients}
    assert max(given_rows.values()) - min(given_rows.values()) <= 2 * max(client.rows for client in clients)


@steadily
@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.booleans())
def test_a_full_house_is_shared_by_peer_and_not_by_session(sessions: list[int], with_chunks: bool) -> None:
    """More rows than a call has room for: each peer gets its share, or what it asks for when that is less."""
    clients = [Client(peer, 1, chunk=False) for peer, count in enumerate(sessions) for _ in range(count)]
    stranger = Client(99, 256, chunk=True)  # whose prompt must not change that
    engine = Engine()
    engine.run([*clients, *([stranger] if with_chunks else [])], 80)
    calls = sum(not call[0].alone for call in engine.calls)
    given_rows = engine.rows_by_peer(chunk=False)
    for peer, count in enumerate(sessions):
        share = min(count, MAX_ROWS // len(sessions))
        assert given_rows[PeerId(f"p{peer}")] >= calls * share - MAX_ROWS


@steadily
@given(CLIENTS, st.lists(st.integers(0, 11), max_size=8))
def test_who_goes_leaves_the_others_what_they_had(clients: list[Client], leaving: list[int]) -> None:
    """Whoever is dropped is never computed again, and everyone else still is."""
    engine = Engine()
    engine.run(clients, 7)
    gone = {number for number in leaving if number < len(clients)}
    for number in gone:
        session = SessionId(number.to_bytes(2, "big"))
        engine.since.pop(session, None)
        assert [work.job for work in engine.policy.drop(session)] == [number]
    left = [number for number in range(len(clients)) if number not in gone]
    served: set[int] = set()
    for _ in range(4 * len(clients) + 4):
        served |= {work.job for work in engine.call()}
    assert served == set(left)
    assert len(engine.policy) == 0

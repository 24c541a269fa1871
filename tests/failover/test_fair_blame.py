"""Poison among innocents, played with the rules of both sides and without any engine: scheduler, strikes, suspicion."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from swarm.client.suspicion import MAX_ENGINES, Suspicion
from swarm.ids import PeerId, SessionId
from swarm.node.scheduler import Group, Policy, Work
from swarm.node.strikes import Strikes

N_STEPS = 6
N_NODES = 3
MOST_ROUNDS = 2000
GROUP = Group(0, 0, 6)


@dataclass(eq=False)
class Node:
    """An engine that is there again as soon as it has died."""

    peer: PeerId
    policy: Policy[int] = field(default_factory=lambda: Policy(max_rows=4))
    strikes: Strikes = field(default_factory=lambda: Strikes(limit=2, remembered=100))
    deaths: int = 0


@dataclass(eq=False)
class Client:
    id: SessionId
    poison_at: int | None  # the step that ends engines
    node: Node
    position: int = 0
    suspicion: Suspicion = field(default_factory=Suspicion)
    suspect: bool = False  # as its node has it
    waits: bool = False
    given_up: bool = False

    @property
    def done(self) -> bool:
        return self.given_up or self.position == N_STEPS

    def push(self) -> None:
        self.waits = True
        work = Work(self.id, PeerId("p"), GROUP, 1, self.position == 0, self.position, suspect=self.suspect)
        self.node.policy.push(work)

    def passed(self) -> None:
        self.waits = self.suspect = False
        self.position += 1
        self.suspicion.passed(self.position)

    def lost(self, *, blamed: bool) -> None:
        self.node.policy.drop(self.id)
        self.waits = False
        self.given_up = blamed and self.suspicion.engine_died(self.node.peer, self.position + 1)

    def open(self, nodes: list[Node], random: Random) -> None:
        willing = [node for node in nodes if not node.strikes.refuses(self.id)]
        assert willing == nodes or self.poison_at is not None, "an innocent is refused"
        self.given_up = not willing
        if willing:
            node = self.node = random.choice(willing)
            self.suspect = self.suspicion.told_to(node.peer) or node.strikes.suspects(self.id)


def call(node: Node, clients: dict[SessionId, Client], nodes: list[Node], random: Random) -> None:
    works = node.policy.next()
    called = [clients[work.session] for work in works]
    assert len(called) == 1 or not any(client.suspect for client in called)
    if not any(client.poison_at == client.position for client in called):
        for client in called:
            client.passed()
        return
    node.deaths += 1
    node.strikes.add([work.session for work in works])
    for client in clients.values():
        if client.node is node and not client.done:
            client.lost(blamed=client in called)
            if not client.given_up:
                client.open(nodes, random)


@given(st.lists(st.none() | st.integers(0, N_STEPS - 1), min_size=1, max_size=8), st.integers(0, 1 << 32))
def test_the_poisonous_are_given_up_and_nobody_else(poison: list[int | None], seed: int) -> None:
    random = Random(seed)
    nodes = [Node(PeerId(f"n{number}")) for number in range(N_NODES)]
    made = [Client(SessionId(bytes([number])), at, random.choice(nodes)) for number, at in enumerate(poison)]
    clients = {client.id: client for client in made}
    for _ in range(MOST_ROUNDS):
        waiting = [client for client in made if not client.done]
        if not waiting:
            break
        for client in waiting:
            if not client.waits and random.random() < 0.7:
                client.push()
        call(random.choice(nodes), clients, nodes, random)
    assert [client.given_up for client in made] == [at is not None for at in poison]
    assert all(client.position == (N_STEPS if at is None else at) for client, at in zip(made, poison, strict=True))
    assert sum(node.deaths for node in nodes) <= MAX_ENGINES * sum(at is not None for at in poison)

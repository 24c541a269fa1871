"""The way to likely neighbours: whom a node asks, what it announces, and what a client makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dht.identity import Identity
from dht.peer import Peer
from dht.record import LinkRtt, NodeState, SpanRecord
from swarm.node import neighbours
from swarm.node.neighbours import MOST_ASKED, MOST_LINKS, Neighbours, NoAnswer, Span, likely, round_trip
from swarm.node.node import SwarmNode
from swarm.protocol import INFO_STREAM, FrameStream, pb
from swarm.routing import RouteRequest, route
from tests.node.harness import LOOPBACK, client_peer, config, until
from tests.routing.records import record

OWN = Span("own", 3, 6)


def asked(records: list[SpanRecord], known: dict[str, float] | None = None) -> list[str]:
    return [found.peer_id for found in likely(records, OWN, known or {})]


def test_those_that_a_session_may_come_from_or_go_to_are_asked() -> None:
    records = [
        record("own", 3, 6),
        record("twin", 3, 6),
        record("over the end", 5, 8),
        record("after", 6, 9),
        record("before", 0, 3),
        record("over the start", 0, 4),
        record("far before", 0, 2),
        record("far after", 7, 10),
        record("joining", 6, 10, state=NodeState.JOINING),
    ]
    found = asked(records)
    assert set(found[:2]) == {"after", "before"}
    assert set(found[2:]) == {"over the end", "over the start"}


def test_the_nearest_and_new_ones_share_the_places() -> None:
    records = [record(f"known {n:02}", 6, 10) for n in range(40)] + [record(f"new {n:02}", 6, 10) for n in range(40)]
    known = {f"known {n:02}": n / 1000 for n in range(40)}
    found = asked(records, known)
    assert len(found) == MOST_ASKED
    assert found[: MOST_ASKED // 2] == [f"known {n:02}" for n in range(MOST_ASKED // 2)]
    assert all(peer.startswith("new") for peer in found[MOST_ASKED // 2 :])
    other = likely(records, Span("another", 3, 6), known)
    assert [entry.peer_id for entry in other] != found, "not everybody asks the same ones"


async def test_links_are_bounded_and_those_that_left_go() -> None:
    shared = Served()
    failing: set[str] = set()

    async def ask(peer_id: str, _addresses: tuple[str, ...]) -> float:
        if peer_id in failing:
            raise NoAnswer("it is silent")
        return int(peer_id) / 1000

    async def nothing() -> list[SpanRecord]:
        return []

    measuring = Neighbours("own", nothing, lambda: shared, ask, 240.0)
    records = [record(str(n), 6, 10) for n in range(1, 60)]
    for _ in range(20):
        await measuring.measure(records)
    assert len(shared.links) == MOST_LINKS
    assert [link.seconds for link in shared.links] == sorted(link.seconds for link in shared.links)
    changes = shared.changes
    await measuring.measure(records[:3])
    assert [link.peer_id for link in shared.links] == ["1", "2", "3"]
    assert shared.changes == changes + 1
    failing.add("2")
    await measuring.measure(records[:3])
    assert [link.peer_id for link in shared.links] == ["1", "3"]
    failing.clear()
    await measuring.measure(records[:3])
    await measuring.measure(records[:3])
    assert [link.peer_id for link in shared.links] == ["1", "2", "3"]


class Served:
    """Layers 3 to 5."""

    span = (3, 6)

    def __init__(self) -> None:
        self.links: tuple[LinkRtt, ...] = ()
        self.changes = 0

    def on_change(self) -> None:
        self.changes += 1


async def silent(stream: FrameStream) -> None:
    while await stream.receive() is not None:
        pass


async def garbled(stream: FrameStream) -> None:
    while await stream.receive() is not None:
        await stream.send(pb.Pong())


async def refusing(stream: FrameStream) -> None:
    await stream.receive()
    await stream.send(pb.Error(code=pb.LIMIT_REACHED, message="no"))


async def leaving(stream: FrameStream) -> None:
    await stream.receive()
    await stream.close()


@pytest.mark.parametrize("answer", [silent, garbled, refusing, leaving])
async def test_a_neighbour_that_does_not_answer_costs_nothing_lasting(
    answer: Callable[[FrameStream], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "ASK_SECONDS", 0.5 if answer is silent else 20.0)
    ended = asyncio.Event()

    async def serve(_peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = FrameStream(reader, writer)
        try:
            await answer(stream)
            while await stream.receive() is not None:
                pass
        finally:
            await stream.close()
            ended.set()

    async with (
        await Peer.start(Identity.ephemeral(), listen=LOOPBACK) as other,
        await Peer.start(Identity.ephemeral(), listen=LOOPBACK) as own,
    ):
        await other.serve_stream(INFO_STREAM, serve)
        tasks = asyncio.all_tasks()
        with pytest.raises(NoAnswer):
            await round_trip(own, other.peer_id, tuple(await other.addresses()))
        async with asyncio.timeout(20):
            await ended.wait()  # the stream was closed from this side
        await until(lambda: len(asyncio.all_tasks()) <= len(tasks))


async def test_an_address_that_is_none_is_no_answer() -> None:
    async with await Peer.start(Identity.ephemeral(), listen=LOOPBACK) as own:
        with pytest.raises(NoAnswer):
            await round_trip(own, Identity.ephemeral().peer_id, ("nonsense",))


async def test_clients_know_the_way_between_two_nodes(llama_untied_path: Path, tmp_path: Path) -> None:
    def measuring(layers: str, peers: tuple[str, ...] = ()) -> SwarmNode:
        given = config(llama_untied_path, layers, tmp_path, peers, links_seconds=0.2)
        return SwarmNode(replace(given, measure_speed=True, speed_folder=tmp_path / "speed"))

    async with measuring("0:3") as entry, measuring("3:6", entry.addresses) as last:
        await until(lambda: bool(entry.shared.links and last.shared.links))
        assert [link.peer_id for link in entry.shared.links] == [last.peer_id]
        assert 0 < entry.shared.links[0].seconds < 5

        async def announced() -> bool:
            return all(found.links for found in await entry.records())

        await until(announced)
        async with client_peer(entry, last):
            records = await last.records()
        request = RouteRequest(entry.manifest.cuts, entry.manifest.artifact_id, 64)
        known = route(records, request).cost
        measured = max(link.seconds for found in records for link in found.links)
        far = [found.model_copy(update={"links": ()}) for found in records]
        assert known - route(far, request).cost == pytest.approx((measured - 0.02) / 2, abs=1e-6)

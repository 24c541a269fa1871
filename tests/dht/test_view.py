"""Reading the swarm, over real daemons."""

from __future__ import annotations

import os
import signal
import time

import pytest

from dht.announcer import Announcer
from dht.envelope import seal_listing, seal_span
from dht.identity import Identity
from dht.keys import ARTIFACTS_KEY, segment_key
from dht.listing import ArtifactEntry
from dht.peer import Peer
from dht.table import NODE_SETTINGS, Entry
from dht.view import SwarmView
from tests.dht.support import ARTIFACT, CUTS, N_LAYERS, StartPeer, span_record, spans_seen, until


async def test_a_client_that_just_joined_sees_every_node(start_peer: StartPeer) -> None:
    identities = [Identity.ephemeral() for _ in range(3)]
    first = await start_peer(identity=identities[0])
    peers = [first, *[await start_peer(first, identity=identity) for identity in identities[1:]]]
    spans = [(0, 5), (5, 9), (8, 12)]
    announcers = [Announcer(peer, identity, CUTS) for peer, identity in zip(peers, identities, strict=True)]
    async with announcers[0], announcers[1], announcers[2]:
        for announcer, identity, span in zip(announcers, identities, spans, strict=True):
            await announcer.publish(span_record(identity.peer_id, *span))
        client = await start_peer(first, client_only=True)
        view = SwarmView(client)
        before = time.monotonic()
        snapshot = await view.refresh(ARTIFACT, N_LAYERS, CUTS)
        assert time.monotonic() - before < 3  # 0.03-0.5 s measured
        listed = await view.artifacts()
    found = [(record.peer_id, record.first, record.last) for record in snapshot.records]
    assert found == [(identity.peer_id, *span) for identity, span in zip(identities, spans, strict=True)]
    assert (snapshot.dropped, view.snapshot) == (0, snapshot)
    assert listed == (ArtifactEntry(artifact_id=ARTIFACT, name="tiny", n_layers=N_LAYERS, cuts=CUTS),)


async def test_an_empty_swarm_has_no_records_and_no_artifacts(start_peer: StartPeer) -> None:
    view = SwarmView(await start_peer())
    assert (await view.refresh(ARTIFACT, N_LAYERS, CUTS)).records == ()
    assert await view.artifacts() == ()


async def test_other_artifacts_are_not_mixed_in(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    async with Announcer(peer, identity, CUTS) as announcer:
        await announcer.publish(span_record(identity.peer_id, artifact_id="cd" * 32))
        assert await spans_seen(peer) == []


async def test_a_record_is_seen_until_its_expiry(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    reader = await start_peer(peer)
    expires = time.time() + 1.5
    sealed = seal_span(identity, 3, expires, span_record(identity.peer_id))
    assert await peer.table.write([Entry(segment_key(ARTIFACT, 3), sealed, expires)]) == 1
    assert await spans_seen(reader) == [(0, N_LAYERS)]

    async def is_gone() -> bool:
        return await spans_seen(reader) == []

    await until(is_gone, seconds=10)
    assert expires <= time.time() < expires + 3


async def test_a_reader_whose_clock_is_far_ahead_counts_expired_records(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    reader = await start_peer(peer, client_only=True, clock=lambda: time.time() + 1000)
    async with Announcer(peer, identity, CUTS) as announcer:
        await announcer.publish(span_record(identity.peer_id))
        view = SwarmView(reader)
        snapshot = await view.refresh(ARTIFACT, N_LAYERS, CUTS)
    assert snapshot.records == ()
    assert (snapshot.dropped, dict(view.rejected)) == (N_LAYERS, {"expired": N_LAYERS})


async def test_a_record_that_contradicts_the_artifact_is_dropped(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    expires = time.time() + 60
    sealed = seal_span(identity, 3, expires, span_record(identity.peer_id, n_layers=N_LAYERS + 1))
    await peer.table.write([Entry(segment_key(ARTIFACT, 3), sealed, expires)])
    snapshot = await SwarmView(peer).refresh(ARTIFACT, N_LAYERS, CUTS)
    assert (snapshot.records, snapshot.dropped) == ((), 1)


async def test_most_nodes_decide_what_an_artifact_is(start_peer: StartPeer) -> None:
    peer = await start_peer()
    expires = time.time() + 60
    true = ArtifactEntry(artifact_id=ARTIFACT, name="tiny", n_layers=N_LAYERS, cuts=CUTS)
    other = ArtifactEntry(artifact_id="cd" * 32, name="other", n_layers=2, cuts=(0, 2))
    lie = true.model_copy(update={"name": "lie"})
    for told in (lie, true, true, other):
        await publish_listing(peer, told, expires)
    assert await SwarmView(peer).artifacts() == (true, other)


async def publish_listing(peer: Peer, told: ArtifactEntry, expires: float) -> None:
    author = Identity.ephemeral()
    table = type(peer.table)(peer.node, author.peer_id)
    assert await table.write([Entry(ARTIFACTS_KEY, seal_listing(author, expires, told), expires)]) == 1


async def test_a_node_that_hangs_only_costs_its_time_limit(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NODE_SETTINGS, "wait_timeout", 0.5)
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    hanging, reader = await start_peer(peer), await start_peer(peer)
    await until(lambda: hanging.peer_id in reader.known_peers())
    async with Announcer(peer, identity, CUTS) as announcer:
        await announcer.publish(span_record(identity.peer_id))
        os.kill(hanging.p2p.pid, signal.SIGSTOP)
        before = time.monotonic()
        assert await spans_seen(reader) == [(0, N_LAYERS)]
        assert time.monotonic() - before < 3
        while hanging.peer_id in reader.known_peers():  # one search need not have asked it
            assert await spans_seen(reader) == [(0, N_LAYERS)]
        os.kill(hanging.p2p.pid, signal.SIGCONT)

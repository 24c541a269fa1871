"""Announcing, leaving, and being heard again after trouble, over real daemons."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dht.addresses import parse_peer_address
from dht.announcer import Announcer, AnnounceTiming
from dht.identity import Identity
from dht.peer import Peer
from dht.record import NodeState, SlotClass
from dht.view import SwarmView
from tests.dht.support import ARTIFACT, CUTS, N_LAYERS, StartPeer, span_record, spans_seen, until

QUICK = AnnounceTiming(every_seconds=0.3, watch_seconds=0.3, gap_seconds=0.1)
NEVER = AnnounceTiming(every_seconds=1e6, watch_seconds=1e6, gap_seconds=0.5)


def sees(peer: Peer, *spans: tuple[int, int]) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return await spans_seen(peer) == list(spans)

    return condition


async def test_changes_are_announced_at_once(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    reader = await start_peer(peer)
    view = SwarmView(reader)
    record = span_record(identity.peer_id, state=NodeState.JOINING)
    async with Announcer(peer, identity, CUTS, NEVER) as announcer:
        for state in NodeState:
            await announcer.publish(record.model_copy(update={"state": state}))
            snapshot = await view.refresh(ARTIFACT, N_LAYERS, CUTS)
            assert [found.state for found in snapshot.records] == [state]
        assert (announcer.status.stored, announcer.status.entries) == (N_LAYERS + 1, N_LAYERS + 1)


async def test_changes_of_load_are_announced_soon_and_together(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    view = SwarmView(peer)
    writes = 0
    write = peer.table.write

    async def counted(entries: list[object]) -> int:
        nonlocal writes
        writes += 1
        return await write(entries)  # type: ignore[arg-type]

    monkeypatch.setattr(peer.table, "write", counted)

    async def all_free() -> bool:
        (record,) = (await view.refresh(ARTIFACT, N_LAYERS, CUTS)).records
        return record.slots != () and record.slots[0].free == 20

    async with Announcer(peer, identity, CUTS, NEVER) as announcer:
        await announcer.publish(span_record(identity.peer_id))
        for free in range(21):
            announcer.update(span_record(identity.peer_id, slots=(SlotClass(tokens=1, total=20, free=free),)))
            await asyncio.sleep(0)
        await until(all_free)
        assert writes == 2


async def test_a_moved_span_is_seen_at_its_new_place_only(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    reader = await start_peer(peer)
    async with Announcer(peer, identity, CUTS, NEVER) as announcer:
        await announcer.publish(span_record(identity.peer_id, 0, 5))
        await announcer.publish(span_record(identity.peer_id, 4, 9))
        assert await spans_seen(reader) == [(4, 9)]
        await announcer.publish(span_record(identity.peer_id, artifact_id="cd" * 32))
        assert await spans_seen(reader) == []


async def test_leaving_is_seen_at_once(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    reader = await start_peer(peer)
    with pytest.raises(RuntimeError, match="the node ends"):
        async with Announcer(peer, identity, CUTS) as announcer:
            await announcer.publish(span_record(identity.peer_id))
            assert await spans_seen(reader) == [(0, N_LAYERS)]
            raise RuntimeError("the node ends")
    assert await spans_seen(reader) == []


async def test_a_withdrawn_record_can_be_published_again(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    async with Announcer(peer, identity, CUTS, NEVER) as announcer:
        await announcer.publish(span_record(identity.peer_id))
        await announcer.withdraw()
        assert await spans_seen(peer) == []
        await announcer.publish(span_record(identity.peer_id))
        assert await spans_seen(peer) == [(0, N_LAYERS)]


async def test_records_are_renewed_before_they_expire(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    timing = AnnounceTiming(every_seconds=0.2, gap_seconds=0.1, expiry_seconds=2.0)
    async with Announcer(peer, identity, CUTS, timing) as announcer:
        published = time.time()
        await announcer.publish(span_record(identity.peer_id))
        while time.time() < published + 4:
            assert await spans_seen(peer) == [(0, N_LAYERS)]


async def test_a_clock_that_was_set_back_does_not_silence_a_node(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    shift = 0.0
    peer = await start_peer(identity=identity, clock=lambda: time.time() + shift)
    reader = await start_peer(peer)
    async with Announcer(peer, identity, CUTS, NEVER) as announcer:
        await announcer.publish(span_record(identity.peer_id, 0, 5))
        shift = -30.0
        await announcer.publish(span_record(identity.peer_id, 4, 9))
        assert await spans_seen(reader) == [(4, 9)]


async def test_a_node_is_heard_again_after_its_bootstrap_peer_restarted(
    start_peer: StartPeer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The new process knows nobody: it must be the node that comes back."""
    caplog.set_level(logging.INFO, "dht")
    with Identity.load_or_create(tmp_path / "bootstrap") as bootstrap_identity:
        bootstrap = await start_peer(identity=bootstrap_identity)
        listen = (parse_peer_address((await bootstrap.addresses())[0]).transport,)
        identity = Identity.ephemeral()
        node = await start_peer(bootstrap, identity=identity)
        async with Announcer(node, identity, CUTS, QUICK) as announcer:
            await announcer.publish(span_record(identity.peer_id))
            await until(lambda: announcer.status.heard is True)
            await bootstrap.close()
            await until(lambda: "cut off from the swarm" in announcer.status.trouble)
            assert "cut off from the swarm: no initial peer answered" in caplog.text
            bootstrap = await start_peer(identity=bootstrap_identity, listen=listen)
            assert await spans_seen(bootstrap) == []
            newcomer = await start_peer(bootstrap, client_only=True)
            await until(sees(newcomer, (0, N_LAYERS)), seconds=60)
            await until(lambda: announcer.status.trouble == "")
            assert "the swarm hears this node again" in caplog.text


async def test_nodes_without_their_bootstrap_peer_stay_together(start_peer: StartPeer) -> None:
    bootstrap = await start_peer()
    identities = [Identity.ephemeral(), Identity.ephemeral()]
    nodes = [await start_peer(bootstrap, identity=identity) for identity in identities]
    announcers = [Announcer(node, identity, CUTS, QUICK) for node, identity in zip(nodes, identities, strict=True)]
    async with announcers[0], announcers[1]:
        await announcers[0].publish(span_record(identities[0].peer_id, 0, 6))
        await announcers[1].publish(span_record(identities[1].peer_id, 6, 12))
        os.kill(bootstrap.p2p.pid, signal.SIGKILL)
        await until(lambda: bootstrap.peer_id not in nodes[0].known_peers())
        assert await spans_seen(nodes[0]) == [(0, 6), (6, 12)]
        assert await spans_seen(nodes[1]) == [(0, 6), (6, 12)]
        newcomer = await start_peer(nodes[1], client_only=True)
        assert await spans_seen(newcomer) == [(0, 6), (6, 12)]


async def test_a_record_nobody_kept_is_noticed_and_sent_again(
    start_peer: StartPeer, caplog: pytest.LogCaptureFixture
) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    other = await start_peer(peer)
    await until(lambda: other.peer_id in peer.known_peers())
    timing = AnnounceTiming(every_seconds=1e6, watch_seconds=0.2)
    async with Announcer(peer, identity, CUTS, timing) as announcer:
        await announcer.publish(span_record(identity.peer_id))
        await until(lambda: announcer.status.heard is True)
        other.node.protocol.storage.clear()
        await until(sees(other, (0, N_LAYERS)))
        await until(lambda: announcer.status.heard is True)


async def test_a_first_node_is_not_in_trouble(start_peer: StartPeer, caplog: pytest.LogCaptureFixture) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    measured = asyncio.Event()
    remember = peer.remember

    async def noticed() -> None:
        await remember()
        measured.set()

    peer.remember = noticed  # type: ignore[method-assign]
    async with Announcer(peer, identity, CUTS, QUICK) as announcer:
        await announcer.publish(span_record(identity.peer_id))
        await measured.wait()
        assert (announcer.status.heard, announcer.status.trouble) == (None, "")
    assert caplog.text == ""


async def test_a_dead_daemon_does_not_hold_up_the_end(start_peer: StartPeer) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(identity=identity)
    async with Announcer(peer, identity, CUTS, QUICK) as announcer:
        await announcer.publish(span_record(identity.peer_id))
        os.kill(peer.p2p.pid, signal.SIGKILL)
        await peer.lost
        await until(lambda: "off the network" in announcer.status.trouble)
        left = time.monotonic()
    assert time.monotonic() - left < 1

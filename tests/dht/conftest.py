"""Real peers on loopback. Every test ends with no daemon of this process left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from dht.identity import Identity
from dht.peer import Peer
from tests.dht.support import LOOPBACK, StartPeer, daemons


@pytest.fixture
async def start_peer() -> AsyncIterator[StartPeer]:
    """``await start_peer(*contacts, **options)``: a peer that joins through those, closed after the test."""
    async with AsyncExitStack() as stack:

        async def start(*contacts: Peer, identity: Identity | None = None, **options: Any) -> Peer:
            initial = [address for contact in contacts for address in await contact.addresses()]
            if not options.get("client_only"):
                options.setdefault("listen", LOOPBACK)
            peer = await Peer.start(identity or Identity.ephemeral(), initial_peers=initial, **options)
            return await stack.enter_async_context(peer)

        yield start
    assert daemons() == [], "a libp2p daemon outlived its peer"

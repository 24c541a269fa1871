"""A node's place in the swarm: its peer, what it sees of the others, and what it tells them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from dht.addresses import announceable
from dht.record import MAX_TEXT, SpanRecord
from swarm.artifact import Manifest
from swarm.errors import NetworkError
from swarm.node.config import NetworkOptions
from swarm.node.identity import own_identity
from swarm.protocol import clean_text

if TYPE_CHECKING:
    from dht.announcer import Announcer
    from dht.peer import Peer
    from dht.view import SwarmView

MOST_NAMED = 3


@dataclass(frozen=True)
class Network:
    """``addresses`` are what others are told."""

    manifest: Manifest
    peer: Peer
    view: SwarmView
    announcer: Announcer
    addresses: tuple[str, ...]

    @property
    def peer_id(self) -> str:
        return self.peer.peer_id

    @property
    def is_alone(self) -> bool:
        """Nobody else has been met: what nobody hears need not be waited for."""
        return not self.peer.known_peers()

    async def records(self) -> tuple[SpanRecord, ...]:
        """What the swarm knows of this artifact, asked now."""
        manifest = self.manifest
        snapshot = await self.view.refresh(manifest.artifact_id, manifest.n_layers, manifest.cuts)
        return snapshot.records

    async def other_models(self) -> tuple[str, ...]:
        """What nodes call the models that this swarm serves, where nobody serves this node's; some of them."""
        listed = await self.view.artifacts()
        if any(entry.artifact_id == self.manifest.artifact_id for entry in listed):
            return ()
        return tuple(clean_text(entry.name, MAX_TEXT) or entry.artifact_id[:12] for entry in listed[:MOST_NAMED])

    async def watch(self) -> None:
        """Raises NetworkError when the libp2p daemon ends, and returns never."""
        code = await asyncio.shield(self.peer.lost)
        raise NetworkError(f"the libp2p daemon ended with code {code}; start the node again")


async def join(stack: AsyncExitStack, options: NetworkOptions, manifest: Manifest) -> Network:
    """Ends with ``stack``, which takes back what was announced."""
    from dht import clock  # these import hivemind, which takes seconds
    from dht.announcer import Announcer
    from dht.peer import Peer
    from dht.view import SwarmView

    identity = stack.enter_context(own_identity(options.identity_path, manifest.name, identity_folder()))
    peer = await Peer.start(
        identity, listen=options.listen, initial_peers=options.initial_peers, announce=options.announce
    )
    stack.push_async_callback(peer.close)
    await clock.check(peer)
    addresses = announceable(await peer.addresses())
    announcer = await stack.enter_async_context(Announcer(peer, identity, manifest.cuts))
    return Network(manifest, peer, SwarmView(peer), announcer, addresses)


async def look(options: NetworkOptions, manifest: Manifest) -> tuple[SpanRecord, ...]:
    """What the swarm knows of the artifact, asked by a peer that nobody hears of. There are no records of a swarm that
    is yet to be started."""
    from dht.identity import Identity
    from dht.peer import Peer
    from dht.view import SwarmView

    if not options.initial_peers:
        return ()
    async with await Peer.start(Identity.ephemeral(), initial_peers=options.initial_peers, client_only=True) as peer:
        snapshot = await SwarmView(peer).refresh(manifest.artifact_id, manifest.n_layers, manifest.cuts)
        return snapshot.records


def identity_folder() -> Path:
    return Path(platformdirs.user_data_dir("glm-swarm")) / "identities"

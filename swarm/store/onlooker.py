"""A look at a swarm from outside: who serves a model, and what that model is. Nothing is stored or announced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from dht.clock import check
from dht.errors import BadAddress, ClockSkewed, DhtError
from dht.identity import Identity
from dht.listing import ArtifactEntry
from dht.peer import Peer
from dht.record import SpanRecord
from dht.view import SwarmView
from swarm.artifact.manifest import MAX_DOCUMENT_BYTES, MAX_NAME, Manifest
from swarm.errors import ClockSkew, NetworkError, NoRoute, SwarmError, UsageError
from swarm.ids import ArtifactId, PeerId
from swarm.protocol import clean_text, pb
from swarm.protocol.questions import Questions

MIN_ID_PREFIX = 6
MANIFEST_SECONDS = 30.0
MAX_TRIES = 8  # peers that are asked for a manifest


class Onlooker:
    """Made by ``joined``."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._view = SwarmView(peer)

    @classmethod
    @asynccontextmanager
    async def joined(cls, peers: Sequence[str]) -> AsyncIterator[Onlooker]:
        """In the swarm as long as it is used. Raises ``NetworkError`` when nobody answers."""
        try:
            async with await Peer.start(Identity.ephemeral(), initial_peers=peers, client_only=True) as peer:
                await check(peer)
                yield cls(peer)
        except BadAddress as error:
            raise UsageError(str(error)) from error
        except ClockSkewed as error:
            raise ClockSkew(str(error)) from error
        except DhtError as error:
            raise NetworkError(str(error)) from error

    async def records(self, manifest: Manifest) -> tuple[SpanRecord, ...]:
        """Of the artifact's nodes. Raises ``NoRoute`` when there are none."""
        snapshot = await self._view.refresh(manifest.artifact_id, manifest.n_layers, manifest.cuts)
        if not snapshot.records:
            raise NoRoute(f"no node of this swarm serves {manifest.name}; check the name and --initial-peers")
        return snapshot.records

    async def manifest(self, model: str) -> Manifest:
        """Of a model by the name its nodes give it, or by the first digits of its id; from them, and checked by that
        id. Raises ``NoRoute`` when nobody serves it."""
        entry = _one_of(model, await self._view.artifacts())
        snapshot = await self._view.refresh(entry.artifact_id, entry.n_layers, entry.cuts)
        name = clean_text(entry.name)[:MAX_NAME]
        failed = "no node answers"
        for record in snapshot.records[:MAX_TRIES]:
            try:
                return await self._read(record, name)
            except SwarmError as error:
                failed = str(error)
        raise NoRoute(f"nobody gave the manifest of {name or model} ({failed}); name it with --manifest FILE")

    async def _read(self, record: SpanRecord, name: str) -> Manifest:
        asked = Questions(self.peer, PeerId(record.peer_id), record.addresses)
        data = await asked.piece(ArtifactId(record.artifact_id), pb.MANIFEST, MAX_DOCUMENT_BYTES, MANIFEST_SECONDS)
        return Manifest.from_json(data, record.artifact_id, name=name)


def _one_of(model: str, entries: Sequence[ArtifactEntry]) -> ArtifactEntry:
    wanted = model.lower()
    by_name = [entry for entry in entries if entry.name.lower() == wanted]
    by_id = [entry for entry in entries if len(wanted) >= MIN_ID_PREFIX and entry.artifact_id.startswith(wanted)]
    found = by_id or by_name
    if len(found) > 1:
        ids = ", ".join(entry.artifact_id[:12] for entry in found)
        raise UsageError(f"{model} stands for several artifacts ({ids}); give the beginning of one id")
    if not found:
        served = ", ".join(f"{clean_text(entry.name) or 'unnamed'} ({entry.artifact_id[:12]})" for entry in entries)
        raise NoRoute(f"no node of this swarm serves {model}, but {served or 'nothing'}; name one of these")
    return found[0]

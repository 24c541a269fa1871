"""What every part needs: a swarm with replicas, and two clients that differ in what they do about a death.

A peer of this process, which serves nothing and never dies, is the door through which nodes join; the bench looks at
the swarm through it, and so does the client that begins again.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.failover.herd import Herd, Member, herd
from dht.record import NodeState, SpanRecord
from swarm.artifact import Manifest, load_manifest
from swarm.client import ChainSession, ClientConfig, SwarmClient
from swarm.client.blame import Avoided
from swarm.client.generate import Vocabulary
from swarm.client.opening import Need, SessionOpener
from swarm.errors import PeerFailed, SwarmError, UsageError
from swarm.ids import PeerId
from swarm.local_swarm import even_spans
from swarm.routing import RouteRequest

if TYPE_CHECKING:
    from dht.peer import Peer
    from dht.view import SwarmView

POLL_SECONDS = 0.1
WHOLE_SECONDS = 120.0
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
JOURNALS = ("--journal-memory", "64MiB")


@dataclass(frozen=True)
class Setting:
    model: Path
    hops: int = 3
    replicas: int = 2
    threads: int = 1  # of each engine
    slots: str = "4x1024"
    chunk_tokens: int = 128
    memory: str = "1GiB"
    cache_dir: Path | None = None

    @property
    def node_options(self) -> tuple[str, ...]:
        kept = ("--threads", str(self.threads), "--slots", self.slots, "--chunk-tokens", str(self.chunk_tokens))
        return (*kept, "--memory", self.memory, *JOURNALS)


class Restarting:
    """The client that is compared with: it opens bare chains, and keeps nothing of a session but who failed in it."""

    def __init__(self, peer: Peer, view: SwarmView, manifest: Manifest) -> None:
        self._peer = peer
        self._view = view
        self._manifest = manifest
        self._avoided = Avoided()

    async def open(self, context_tokens: int) -> ChainSession:
        """Over the best chain, around those that failed a moment ago. Raises NoRoute, PeerFailed."""
        manifest = self._manifest
        request = RouteRequest(manifest.cuts, manifest.artifact_id, context_tokens=1)
        opener = SessionOpener(self._peer, self.look, manifest, request, ClientConfig(), self._avoided, tell)
        return await opener.open(Need(context_tokens - 1, 1, context_tokens))

    def blame(self, error: PeerFailed) -> None:
        if error.peer:
            self._avoided.add(PeerId(error.peer))

    async def look(self) -> Sequence[SpanRecord]:
        manifest = self._manifest
        return (await self._view.refresh(manifest.artifact_id, manifest.n_layers, manifest.cuts)).records


@dataclass(frozen=True, eq=False)
class Stage:
    setting: Setting
    manifest: Manifest
    herd: Herd
    client: SwarmClient  # whose sessions last
    restarting: Restarting
    vocabulary: Vocabulary  # without stop tokens: an answer is as long as it was asked for
    door: str

    @property
    def n_hops(self) -> int:
        return self.setting.hops

    async def whole(self) -> None:
        """Replaces the dead; returns when everybody can see that all nodes serve and have a free slot."""
        await self.herd.revive()
        async with asyncio.timeout(WHOLE_SECONDS):
            while not self._serves(await self.restarting.look()):  # noqa: ASYNC110 (of other processes)
                await asyncio.sleep(POLL_SECONDS)

    async def spare(self, peer_id: str) -> Member:
        """The node, which can be killed now: another one serves its span."""
        member = self.herd.member(peer_id)
        if not self.herd.has_spare(member):
            await self.whole()
        return member

    def _serves(self, records: Sequence[SpanRecord]) -> bool:
        ready = {
            record.peer_id
            for record in records
            if record.state is NodeState.ONLINE and any(slot.free for slot in record.slots)
        }
        return all(member.peer_id in ready for member in self.herd.members if member.lives)

    @contextlib.asynccontextmanager
    async def standby_client(self) -> AsyncIterator[SwarmClient]:
        """One that keeps copies. Raises UsageError when this build's client can't."""
        if not can_stand_by():
            raise UsageError("this build's client has no standby; measure without it: --without-standby")
        config = replace(self.client.config, standby=True)
        async with SwarmClient.connect([self.door], config, on_status=tell) as client:
            await client.artifact()
            yield client


def can_stand_by() -> bool:
    return any(field.name == "standby" for field in fields(ClientConfig))


def tell(text: str) -> None:
    """Progress, beside the figures on stdout."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """For logs and keys. Kept after an error: its message may name a log."""
    made = Path(tempfile.mkdtemp(prefix="glm-swarm-failover-"))
    try:
        yield made
    except SwarmError:
        raise
    except BaseException:
        shutil.rmtree(made)
        raise
    shutil.rmtree(made)


@contextlib.asynccontextmanager
async def stage(setting: Setting) -> AsyncIterator[Stage]:
    """Until the block ends, however it ends; then every process is gone. Raises SwarmError when a node does not come
    up."""
    from dht.identity import Identity
    from dht.peer import Peer
    from dht.view import SwarmView

    manifest = load_manifest(setting.model)
    spans = even_spans(manifest, setting.hops)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(_folder())
        peer = await stack.enter_async_context(await Peer.start(Identity.ephemeral(), listen=(LOOPBACK,)))
        door = (await peer.addresses())[0]
        tell(f"starting {setting.replicas * len(spans)} nodes: {setting.replicas} of each of {len(spans)} spans")
        nodes = await stack.enter_async_context(
            herd(setting.model, folder, spans, setting.replicas, setting.node_options, door)
        )
        restarting = Restarting(peer, SwarmView(peer), manifest)
        config = ClientConfig(cache_dir=setting.cache_dir)
        client = await stack.enter_async_context(SwarmClient.connect([door], config, on_status=tell))
        vocabulary = Vocabulary((await client.artifact()).vocabulary.piece, frozenset())
        made = Stage(setting, manifest, nodes, client, restarting, vocabulary, door)
        await made.whole()
        yield made

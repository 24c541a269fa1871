"""What nodes say their tensors are digested to: asked on info streams, and checked.

A node's record has one root for its span, which the list it serves has to come to. So nodes with the same span and the
same root need to be asked once; and a list that is not what the record promises says nothing but that the peer lies.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dht.record import SpanRecord
from swarm.artifact.digest_list import DigestList, list_bytes
from swarm.artifact.manifest import Manifest
from swarm.errors import ArtifactError, ProtocolError, SwarmError
from swarm.ids import PeerId
from swarm.protocol import pb
from swarm.protocol.questions import Dialer, Questions
from swarm.store.digests import span_root

AT_ONCE = 8
SECONDS = 30.0  # for one peer's list, however slowly it comes
MAX_LISTS = 64  # different ones: a record costs nothing to make
MAX_TRIES = 3  # peers that are asked for the same one
NOT_ASKED = "not asked: there are too many like it"


@dataclass
class Told:
    """``held``: digests by peer. ``failed``: why a peer's are not known. ``silent``: peers that announce none."""

    held: dict[str, Mapping[str, str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)


class DigestReader:
    """Asks nodes of one artifact."""

    def __init__(self, network: Dialer, manifest: Manifest, seconds: float = SECONDS) -> None:
        self._network = network
        self._manifest = manifest
        self._seconds = seconds
        self._places = asyncio.Semaphore(AT_ONCE)

    async def read(self, records: Iterable[SpanRecord]) -> Told:
        """Never raises for what a peer does."""
        told = Told()
        groups: defaultdict[tuple[int, int, bool, str], list[SpanRecord]] = defaultdict(list)
        for record in records:
            if not record.digest_root:
                told.silent.append(record.peer_id)
            elif record.last > self._manifest.n_layers or record.first >= record.last:
                told.failed[record.peer_id] = "its layers are not the model's"
            else:
                groups[record.first, record.last, record.has_mtp, record.digest_root].append(record)
        asked = list(groups.values())
        for group in asked[MAX_LISTS:]:
            told.failed.update((record.peer_id, NOT_ASKED) for record in group)
        await asyncio.gather(*(self._ask_one_of(group, told) for group in asked[:MAX_LISTS]))
        return told

    async def _ask_one_of(self, group: Sequence[SpanRecord], told: Told) -> None:
        """The list of one is that of all, for it comes to the root that all of them announce."""
        failed: dict[str, str] = {}
        for record in group[:MAX_TRIES]:
            try:
                async with self._places:
                    tensors = await self._tensors(record)
            except SwarmError as error:
                failed[record.peer_id] = str(error)
                continue
            told.held.update((peer.peer_id, tensors) for peer in group)
            return
        told.failed.update((record.peer_id, failed.get(record.peer_id, NOT_ASKED)) for record in group)

    async def _tensors(self, record: SpanRecord) -> Mapping[str, str]:
        manifest, peer_id = self._manifest, PeerId(record.peer_id)
        names = [tensor.name for tensor in manifest.span_tensors(record.first, record.last, mtp=record.has_mtp)]
        asked = Questions(self._network, peer_id, record.addresses)
        size = list_bytes(manifest.artifact_id, names)
        data = await asked.piece(manifest.artifact_id, pb.DIGESTS, size, self._seconds)
        try:
            digests = DigestList.from_json(data)
            digests.check_covers(manifest.artifact_id, names)
        except ArtifactError as error:
            what = str(error).partition("; ")[0]
            raise ProtocolError(
                f"peer {peer_id} served no list of its tensors ({what}); ask another peer", peer_id
            ) from error
        if span_root(digests.tensors) != record.digest_root:
            raise ProtocolError(
                f"peer {peer_id} served other digests than its record promises; ask again, or another peer", peer_id
            )
        return digests.tensors

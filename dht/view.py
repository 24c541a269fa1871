"""What this peer believes about the swarm."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dht.envelope import Envelope, open_listing, open_span
from dht.errors import RecordRejected, Rejection
from dht.keys import ARTIFACTS_KEY, segment_key, segments
from dht.listing import ArtifactEntry
from dht.record import SpanRecord

if TYPE_CHECKING:
    from dht.peer import Peer


@dataclass(frozen=True)
class Snapshot:
    """One record per peer, ordered by first layer. ``dropped`` entries were read but are not to be trusted."""

    records: tuple[SpanRecord, ...]
    taken_at: float  # Unix time of the peer's clock
    dropped: int


class SwarmView:
    """Reads the DHT on demand; ``snapshot`` is the last result."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._rejected: Counter[Rejection] = Counter()
        self.snapshot = Snapshot((), 0.0, 0)

    @property
    def rejected(self) -> Counter[Rejection]:
        """How many entries were refused since the start and why: read here, or sent here to be stored."""
        return self._rejected + self._peer.table.rejected + self._peer.validator.rejected

    async def refresh(self, artifact_id: str, n_layers: int, cuts: Sequence[int]) -> Snapshot:
        """The nodes that serve layers of the artifact. ``cuts`` ascend from 0 to ``n_layers``."""
        before = self.rejected.total()
        keys = [segment_key(artifact_id, first) for first in segments(0, n_layers, cuts)]
        found = await self._peer.table.read(keys)
        records = self._newest([envelope for envelopes in found.values() for envelope in envelopes])
        fitting = [record for record in records if record.n_layers == n_layers]
        self._rejected[Rejection.MALFORMED] += len(records) - len(fitting)
        fitting.sort(key=lambda record: (record.first, record.last, record.peer_id))
        self.snapshot = Snapshot(tuple(fitting), self._peer.clock(), self.rejected.total() - before)
        return self.snapshot

    async def artifacts(self) -> tuple[ArtifactEntry, ...]:
        """The artifacts that nodes say they serve, most nodes first.

        Where nodes disagree about one artifact, the description given by most of them is kept.
        """
        found = await self._peer.table.read([ARTIFACTS_KEY])
        told: Counter[ArtifactEntry] = Counter()
        for envelope in found[ARTIFACTS_KEY]:
            try:
                told[open_listing(envelope)] += 1
            except RecordRejected as error:
                self._rejected[error.reason] += 1
        chosen: dict[str, ArtifactEntry] = {}
        for entry, _ in sorted(told.items(), key=lambda item: (-item[1], item[0].artifact_id)):
            chosen.setdefault(entry.artifact_id, entry)
        return tuple(chosen.values())

    def _newest(self, envelopes: Sequence[Envelope]) -> list[SpanRecord]:
        """One record per peer, the one that expires last; none for peers that took it back."""
        by_peer: defaultdict[str, list[Envelope]] = defaultdict(list)
        for envelope in envelopes:
            by_peer[envelope.peer_id].append(envelope)
        records = (self._first_readable(entries) for entries in by_peer.values())
        return [record for record in records if record is not None]

    def _first_readable(self, envelopes: list[Envelope]) -> SpanRecord | None:
        for envelope in sorted(envelopes, key=lambda found: found.expires, reverse=True):
            try:
                return open_span(envelope)
            except RecordRejected as error:
                self._rejected[error.reason] += 1
        return None

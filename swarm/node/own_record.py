"""The node's own record: what the swarm is told of it. Readers drop records whose texts are not printable."""

from __future__ import annotations

from collections.abc import Sequence

from dht.record import MAX_TEXT, NodeState, SpanRecord
from swarm.artifact import Manifest
from swarm.node.plan import Plan
from swarm.node.shared import Shared
from swarm.node.software import software
from swarm.protocol import PROTOCOL_VERSION, clean_text


def make_record(shared: Shared, peer_id: str, addresses: Sequence[str]) -> SpanRecord:
    manifest, info = shared.manifest, shared.host.info_or_none
    speed, digests = shared.speed, shared.span_digests
    return SpanRecord(
        peer_id=peer_id,
        artifact_id=manifest.artifact_id,
        artifact_name=clean_text(manifest.name, MAX_TEXT),
        n_layers=manifest.n_layers,
        first=shared.span[0],
        last=shared.span[1],
        state=shared.state,
        protocol_version=PROTOCOL_VERSION,
        numerics_id="" if info is None else info.numerics_id,
        slots=shared.slots(),
        chunk_tokens=shared.chunk_tokens,
        decode_tokens_per_second=speed.decode_tokens_per_second,
        prefill_tokens_per_second=speed.prefill_tokens_per_second,
        queue=shared.queue,
        links=shared.links,
        addresses=tuple(addresses)[:16],
        public_name=shared.public_name,
        software=software(),
        has_mtp=info is not None and info.n_mtp > 0,
        digest_root="" if digests is None else digests.root,
    )


def joining_record(
    manifest: Manifest, plan: Plan, peer_id: str, addresses: Sequence[str], public_name: str
) -> SpanRecord:
    """Of a node that has nothing yet but a plan."""
    return SpanRecord(
        peer_id=peer_id,
        artifact_id=manifest.artifact_id,
        artifact_name=clean_text(manifest.name, MAX_TEXT),
        n_layers=manifest.n_layers,
        first=plan.first,
        last=plan.last,
        state=NodeState.JOINING,
        protocol_version=PROTOCOL_VERSION,
        numerics_id="",
        chunk_tokens=plan.chunk_tokens,
        addresses=tuple(addresses)[:16],
        public_name=clean_text(public_name, MAX_TEXT),
        software=software(),
    )

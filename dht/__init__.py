"""Peer identity, signed span records, announcing, and a local view of the swarm.

Names load on first use: ``import dht`` and its pure parts do not load the network stack, which takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dht.addresses import announceable, parse_peers
    from dht.announcer import Announcer
    from dht.identity import Identity
    from dht.listing import ArtifactEntry
    from dht.peer import Peer
    from dht.record import LinkRtt, NodeState, SlotClass, SpanRecord
    from dht.view import Snapshot, SwarmView

_HOMES = {
    "Announcer": "dht.announcer",
    "ArtifactEntry": "dht.listing",
    "Identity": "dht.identity",
    "LinkRtt": "dht.record",
    "NodeState": "dht.record",
    "Peer": "dht.peer",
    "SlotClass": "dht.record",
    "Snapshot": "dht.view",
    "SpanRecord": "dht.record",
    "SwarmView": "dht.view",
    "announceable": "dht.addresses",
    "parse_peers": "dht.addresses",
}

__all__ = [
    "Announcer",
    "ArtifactEntry",
    "Identity",
    "LinkRtt",
    "NodeState",
    "Peer",
    "SlotClass",
    "Snapshot",
    "SpanRecord",
    "SwarmView",
    "announceable",
    "parse_peers",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""How far this machine's clock is from the swarm's: entries expire by the clock of whoever holds or reads them."""

from __future__ import annotations

import asyncio
import random
from statistics import median
from typing import TYPE_CHECKING, Any

from hivemind.p2p import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2

from dht.errors import ClockSkewed

if TYPE_CHECKING:
    from dht.peer import Peer

MAX_CLOCK_OFFSET_SECONDS = 3.0
ANSWER_SECONDS = 3.0
MAX_ASKED = 9


async def measure(peer: Peer) -> float | None:
    """Seconds to add to this clock to get the swarm's: the median over known nodes. None when nobody answers.

    Nodes that don't answer leave the routing table.

    An answer is off by half its round trip at most, so by 1.5 s in the worst case and far less in practice.
    """
    known = list(peer.node.protocol.routing_table.peer_id_to_uid)
    asked = random.sample(known, min(len(known), MAX_ASKED))
    answers = await asyncio.gather(*(_offset(peer, remote) for remote in asked))
    offsets = [offset for offset in answers if offset is not None]
    return median(offsets) if offsets else None


async def check(peer: Peer) -> float | None:
    """``measure``, raising ClockSkewed when the offset is more than the swarm tolerates."""
    offset = await measure(peer)
    if offset is not None and abs(offset) > MAX_CLOCK_OFFSET_SECONDS:
        raise ClockSkewed(offset, MAX_CLOCK_OFFSET_SECONDS)
    return offset


async def _offset(peer: Peer, remote: Any) -> float | None:
    protocol = peer.node.protocol
    request = dht_pb2.PingRequest(peer=protocol.node_info, validate=False)
    asked = peer.clock()
    try:
        response = await protocol.get_stub(remote).rpc_ping(request, timeout=ANSWER_SECONDS)
    except (TimeoutError, P2PDaemonError, P2PHandlerError):
        await protocol.update_routing_table(protocol.routing_table.get(peer_id=remote), remote, responded=False)
        return None
    theirs: float = response.dht_time
    return theirs - (asked + peer.clock()) / 2 if theirs > 0 else None

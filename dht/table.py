"""Reading and writing the DHT's entries.

hivemind's caches are off (see ``NODE_SETTINGS``), so an answer is what other nodes hold now, and an entry ends when its
own expiry says so.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID

from dht.envelope import Envelope, check
from dht.errors import RecordRejected, Rejection
from dht.guard import KEYS_PER_CALL
from dht.keys import key_bytes, key_hash

logger = logging.getLogger(__name__)

NODE_SETTINGS: dict[str, Any] = {
    # A cached dictionary is returned until its last entry expires, without those who joined since.
    "cache_locally": False,
    "cache_nearest": 0,
    "cache_on_store": False,
    "cache_refresh_before_expiry": 0,
    # Shares the result of a search that began earlier: a reader could miss what was stored before it asked.
    "reuse_get_requests": False,
    # A peer that was away is asked again after this long. hivemind doubles it each time, without end.
    "blacklist_time": 5.0,
    "backoff_rate": 1.0,
    "chunk_size": KEYS_PER_CALL,
    "wait_timeout": 3.0,
}
READ_SECONDS = 8.0


@dataclass(frozen=True)
class Entry:
    key: str
    sealed: bytes
    expires: float


class Table:
    """The entries as seen from one peer. ``rejected`` counts what reading dropped, by reason."""

    def __init__(self, node: DHTNode, peer_id: str, clock: Callable[[], float] = time.time) -> None:
        self._node = node
        self._peer_id = peer_id
        self._clock = clock
        self.rejected: Counter[Rejection] = Counter()

    async def read(self, keys: Sequence[str]) -> dict[str, list[Envelope]]:
        """Every good entry under each key. Keys nobody answered for in time have none, which is logged."""
        futures = await self._node.get_many(
            [key_bytes(key) for key in keys], sufficient_expiration_time=math.inf, return_futures=True
        )
        if not futures:
            return {}
        _, pending = await asyncio.wait(futures.values(), timeout=READ_SECONDS)
        for future in pending:
            future.cancel()
        if pending:
            logger.warning("%d of %d DHT keys were not answered within %g s", len(pending), len(keys), READ_SECONDS)
        return {key: self._opened(key, futures[key_bytes(key)]) for key in keys}

    async def write(self, entries: Sequence[Entry]) -> int:
        """Stores own entries at the nodes nearest to their keys; how many of them somebody took.

        One message per node with all that belongs there: hivemind's ``store_many`` sends one per node and key, and
        reads every key before.
        """
        key_ids = [DHTID.from_bytes(key_hash(entry.key)) for entry in entries]
        nearest = await self._nearest_nodes(key_ids)
        places: defaultdict[Any, list[int]] = defaultdict(list)
        for place, key_id in enumerate(key_ids):
            for remote in nearest[key_id]:
                places[remote].append(place)
        stored = await asyncio.gather(*(self._store(remote, entries, mine) for remote, mine in places.items()))
        return len({place for found in stored for place in found})

    async def others_hold(self, key: str) -> bool | None:
        """Whether another node returns the own entry under ``key``; None when there is no other node."""
        protocol = self._node.protocol
        key_id = DHTID.from_bytes(key_hash(key))
        neighbours = protocol.routing_table.get_nearest_neighbors(key_id, self._node.num_replicas)
        if not neighbours:
            return None
        answers = await asyncio.gather(*(protocol.call_find(peer, [key_id]) for _, peer in neighbours))
        found = [answer[key_id][0] for answer in answers if answer]
        return any(value is not None and self._peer_id in value.value for value in found)

    async def _nearest_nodes(self, key_ids: Sequence[DHTID]) -> dict[DHTID, list[Any]]:
        """Peer ids of the nodes to store each key at, this one included unless it is a client."""
        protocol, count = self._node.protocol, self._node.num_replicas
        if len(protocol.routing_table.peer_id_to_uid) >= protocol.bucket_size:
            found = await self._node.find_nearest_nodes(key_ids, k_nearest=count, exclude_self=protocol.client_mode)
            return {key_id: list(found[key_id].values()) for key_id in key_ids}
        own = [] if protocol.client_mode else [(self._node.node_id, self._node.peer_id)]
        known = own + [(node_id, peer_id) for peer_id, node_id in protocol.routing_table.peer_id_to_uid.items()]
        return {
            key_id: [remote for _, remote in nsmallest(count, known, key=lambda node: key_id.xor_distance(node[0]))]
            for key_id in key_ids
        }

    async def _store(self, remote: Any, entries: Sequence[Entry], places: Sequence[int]) -> list[int]:
        """Which of ``places`` the remote took."""
        protocol = self._node.protocol
        key_ids = [DHTID.from_bytes(key_hash(entries[place].key)) for place in places]
        values = [protocol.serializer.dumps(entries[place].sealed) for place in places]
        expiries = [entries[place].expires for place in places]
        if remote == self._node.peer_id:
            items = zip(key_ids, values, expiries, strict=True)
            taken = [protocol.storage.store_subkey(key_id, self._peer_id, *item) for key_id, *item in items]
        else:
            subkeys = [self._peer_id] * len(places)
            taken = await protocol.call_store(remote, key_ids, values, expiries, subkeys) or [False] * len(places)
        return [place for place, took in zip(places, taken, strict=False) if took]

    def _opened(self, key: str, future: asyncio.Future[Any]) -> list[Envelope]:
        found = None if future.cancelled() else future.result()
        if found is None or not isinstance(found.value, dict):
            return []
        envelopes = []
        for subkey, (sealed, expires) in found.value.items():
            try:
                envelopes.append(check(key_hash(key), subkey, sealed, expires, self._clock()))
            except RecordRejected as error:
                self.rejected[error.reason] += 1
        return envelopes

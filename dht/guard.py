"""hivemind's DHT protocol, made safe against peers that answer or store what they like.

What it does by itself, and why that is not enough:
- it rejects a whole dictionary for one bad entry, so one peer could hide all others (``_keep_valid`` drops the entry);
- it takes a dictionary's size limit and expiry from the sender: a limit of 1 loses entries, an infinite expiry ends
  every search with that answer, a text as limit hangs the search for good (``_rebuilt`` makes a fresh dictionary);
- it stores without limit, and answers above 4 MiB fail as a whole (``BoundedStorage``);
- it looks at the sender's node id in a task that nobody waits for, whose failure ends up as a traceback in the log;
- it answers as many keys as are asked for, one of them as often as it is named: a request of 3 MiB costs a second of
  computing and any amount of memory, and an answer that is too large stays in memory for good (``_Bounded``);
- it hands everything it stores to a newcomer in one message, with the same limit, and drops the newcomer from its
  routing table when that fails (``call_store`` in parts).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import ValueWithExpiration

# Eight keys are read in one call (see KEYS_PER_CALL); eight full ones stay below hivemind's 4 MiB for a message.
MAX_KEY_BYTES = 384 << 10
KEYS_PER_CALL = 8
MAX_ENTRIES_PER_KEY = 512
MAX_STORAGE_BYTES = 64 << 20
MAX_NEIGHBOURS = 20  # hivemind's bucket size: an honest peer names no more
STORE_BATCH_BYTES = 1 << 20
MAX_KEYS_ASKED = 64  # an honest peer asks for KEYS_PER_CALL at most
MAX_ANSWER_BYTES = 6 << 20  # below hivemind's own limit
# What a request may have. The largest honest one to store is a full key that follows an almost full batch.
_LIMITS: dict[str, tuple[Any, int]] = {
    "rpc_ping": (dht_pb2.PingRequest, 4 << 10),
    "rpc_find": (dht_pb2.FindRequest, 8 << 10),
    "rpc_store": (dht_pb2.StoreRequest, 2 << 20),
}
_ENTRY_OVERHEAD_BYTES = 100  # subkey, expiry, framing
_RECOUNT_EVERY = 256

Handler = Callable[[bytes, Any], Awaitable[bytes]]


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """Dictionaries only. When full it refuses new subkeys and keeps what it has: a flood can't push others out."""

    def __init__(self) -> None:
        super().__init__()
        self._estimate_bytes = 0  # never too low; entries that expire are seen at the next recount
        self._additions = 0

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """False only when there is no room: hivemind stops storing a dictionary at the first False."""
        found = super().get(key)
        entries = found.value if found is not None else DictionaryDHTValue()
        known = entries.get(subkey)
        if known is not None and known.expiration_time >= expiration_time:
            return True  # hivemind would shorten the newer entry's life to the older one's
        if known is None and not self._has_room(entries, len(value) + _ENTRY_OVERHEAD_BYTES):
            return False
        entries.store(subkey, value, expiration_time)
        if found is None or expiration_time > found.expiration_time:
            super(DHTLocalStorage, self).store(key, entries, expiration_time)
        return True

    def get(self, key: DHTID) -> Any:
        """A copy: a search merges what it finds into the dictionary it started from."""
        found = super().get(key)
        return None if found is None else _copied(found.value)

    def _has_room(self, entries: DictionaryDHTValue, added_bytes: int) -> bool:
        self._additions += 1
        if self._additions % _RECOUNT_EVERY == 0:  # counting everything for every addition would be a gift to a flood
            self._estimate_bytes = sum(_size_bytes(item.value) for _, item in self.items())
        if len(entries) >= MAX_ENTRIES_PER_KEY or _size_bytes(entries) + added_bytes > MAX_KEY_BYTES:
            return False
        if self._estimate_bytes + added_bytes > MAX_STORAGE_BYTES:
            return False
        self._estimate_bytes += added_bytes
        return True


def guard(protocol: DHTProtocol) -> None:
    """Call it before the node meets anybody."""
    protocol.storage = BoundedStorage()
    protocol.cache = BoundedStorage()
    unguarded_find, unguarded_store = protocol.call_find, protocol.call_store

    async def call_find(peer: Any, keys: Any) -> Any:
        found = await unguarded_find(peer, keys)
        if found is None:
            return None
        return {key: (_rebuilt(value), _first(neighbours)) for key, (value, neighbours) in found.items()}

    async def call_store(
        peer: Any, keys: Any, values: Any, expiration_time: Any, subkeys: Any = None, in_cache: Any = None
    ) -> Any:
        expiries = [expiration_time] * len(keys) if isinstance(expiration_time, float) else list(expiration_time)
        stored: list[bool] = []
        for part in _batches(values):
            answer = await unguarded_store(
                peer, keys[part], values[part], expiries[part], subkeys and subkeys[part], in_cache
            )
            if answer is None:
                return None
            stored.extend(answer)
        return stored

    protocol.call_find, protocol.call_store = call_find, call_store
    _bound_requests(protocol.p2p._client.control.unary_handlers)
    protocol._validate_dictionary = lambda key, entries: _keep_valid(protocol, key, entries)


def _bound_requests(handlers: dict[str, Handler]) -> None:
    """Refused requests end in an error at whoever sent them."""
    for name, handler in list(handlers.items()):
        limit = _LIMITS.get(name.rpartition(".")[2])
        if limit is not None:
            handlers[name] = _Bounded(handler, *limit)


class _Bounded:
    """One of the protocol's handlers, for requests that an honest peer could send."""

    def __init__(self, handler: Handler, kind: Any, max_bytes: int) -> None:
        self._handler = handler
        self._kind = kind
        self._max_bytes = max_bytes

    async def __call__(self, request: bytes, remote: Any) -> bytes:
        if len(request) > self._max_bytes:
            raise P2PHandlerError(f"a request of {len(request)} bytes is over the limit of {self._max_bytes}")
        parsed = self._kind.FromString(request)
        if len(parsed.peer.node_id) not in (0, DHTID.HASH_NBYTES):
            raise P2PHandlerError("the node id has a wrong length")
        if isinstance(parsed, dht_pb2.FindRequest):
            _check_keys(parsed.keys)
        answer = await self._handler(request, remote)
        if len(answer) > MAX_ANSWER_BYTES:
            raise P2PHandlerError("the answer is too large; ask for fewer keys")
        return answer


def _check_keys(keys: Sequence[bytes]) -> None:
    if len(keys) > MAX_KEYS_ASKED or len(set(keys)) < len(keys):
        raise P2PHandlerError(f"at most {MAX_KEYS_ASKED} keys are answered at once, each only once")


def _keep_valid(protocol: DHTProtocol, key: bytes, entries: DictionaryDHTValue) -> bool:
    """Drops what the validator refuses, and looks at no more than an honest peer would send."""
    with entries.freeze():
        entries.maxsize = float("inf")
        for place, (subkey, (value, expires)) in enumerate(list(entries.items())):
            packed = protocol.serializer.dumps(subkey)
            if place >= MAX_ENTRIES_PER_KEY or not protocol._validate_record(key, packed, value, expires):
                del entries[subkey]
        return bool(entries)


def _rebuilt(found: Any) -> Any:
    """The same entries in a dictionary whose other fields are ours."""
    return None if found is None or not isinstance(found.value, DictionaryDHTValue) else _copied(found.value)


def _copied(entries: DictionaryDHTValue) -> Any:
    copy = DictionaryDHTValue()
    for subkey, (value, expires) in entries.items():
        copy.store(subkey, value, expires)
    return ValueWithExpiration(copy, copy.latest_expiration_time) if copy else None


def _first(neighbours: dict[Any, Any]) -> dict[Any, Any]:
    return dict(islice(neighbours.items(), MAX_NEIGHBOURS))


def _size_bytes(entries: DictionaryDHTValue) -> int:
    return sum(len(value) + _ENTRY_OVERHEAD_BYTES for _, (value, _) in entries.items())


def _batches(values: Sequence[Any]) -> list[slice]:
    parts, start, size = [], 0, 0
    for place, value in enumerate(values):
        added = _size_bytes(value) if isinstance(value, DictionaryDHTValue) else len(value)
        if place > start and size + added > STORE_BATCH_BYTES:
            parts.append(slice(start, place))
            start, size = place, 0
        size += added
    parts.append(slice(start, len(values)))
    return parts

"""A hostile peer against the DHT: whatever it stores or answers, the entries of others stay and reading ends."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from dht.clock import measure
from dht.envelope import MAX_LIFE_SECONDS, MAX_SEALED_BYTES, Kind, Place, seal, seal_span
from dht.errors import Rejection
from dht.guard import MAX_ENTRIES_PER_KEY, MAX_KEY_BYTES, MAX_KEYS_ASKED, BoundedStorage
from dht.identity import Identity
from dht.keys import key_hash, segment_key
from dht.peer import Peer
from dht.table import Entry
from dht.view import SwarmView
from tests.dht.support import ARTIFACT, CUTS, N_LAYERS, StartPeer, span_record

SEGMENT = 3
KEY = segment_key(ARTIFACT, SEGMENT)
KEY_ID = DHTID.from_bytes(key_hash(KEY))
HONEST, HOSTILE = Identity.ephemeral(), Identity.ephemeral()


def entry(identity: Identity, expires: float, segment: int = SEGMENT) -> bytes:
    return seal_span(identity, segment, expires, span_record(identity.peer_id))


def packed(value: object) -> bytes:
    data: bytes = MSGPackSerializer.dumps(value)
    return data


def hostile_entries() -> Iterator[tuple[str, Any, bytes, float]]:
    """(what, subkey, value as stored, expiry)"""
    now = time.time()
    soon, too_late = now + 60, now + MAX_LIFE_SECONDS + 60
    forged = seal_span(HOSTILE, SEGMENT, soon + 30, span_record(HONEST.peer_id))
    yield "forged record", HONEST.peer_id, packed(forged), soon + 30
    yield "record of another key", HOSTILE.peer_id, packed(entry(HOSTILE, soon, SEGMENT + 1)), soon
    yield "prolonged record", HOSTILE.peer_id, packed(entry(HOSTILE, soon)), soon + 100
    yield "far expiry", HOSTILE.peer_id, packed(entry(HOSTILE, too_late)), too_late
    yield "endless", HOSTILE.peer_id, packed(entry(HOSTILE, math.inf)), math.inf
    yield "oversized", HOSTILE.peer_id, packed(bytes(MAX_SEALED_BYTES + 1)), soon
    yield "huge", HOSTILE.peer_id, packed(bytes(1 << 20)), soon
    yield "garbage", HOSTILE.peer_id, packed(os.urandom(500)), soon
    yield "no msgpack", HOSTILE.peer_id, b"\xc1" + os.urandom(100), soon
    yield "a list", HOSTILE.peer_id, packed([1, [2, [3]]]), soon
    yield "a text", HOSTILE.peer_id, packed("x"), soon
    yield "subkey without a key in it", "nobody", packed(entry(HOSTILE, soon)), soon
    yield "numeric subkey", 7, packed(entry(HOSTILE, soon)), soon
    yield "long subkey", "x" * 100_000, packed(entry(HOSTILE, soon)), soon


@pytest.fixture
async def swarm(start_peer: StartPeer) -> tuple[Peer, Peer]:
    """An honest peer whose record stands at itself, and a hostile one beside it."""
    honest = await start_peer(identity=HONEST)
    hostile = await start_peer(honest, identity=HOSTILE)
    expires = time.time() + 60
    assert await honest.table.write([Entry(KEY, entry(HONEST, expires), expires)]) == 1
    hostile.node.protocol.storage = DHTLocalStorage()
    return honest, hostile


async def send(hostile: Peer, victim: Peer, subkey: Any, value: Any, expires: float, in_cache: bool = False) -> bool:
    remote = PeerID.from_base58(victim.peer_id)
    stored = await hostile.node.protocol.call_store(remote, [KEY_ID], [value], expires, [subkey], in_cache)
    return bool(stored and stored[0])


async def readers_see(peer: Peer) -> list[str]:
    snapshot = await SwarmView(peer).refresh(ARTIFACT, N_LAYERS, CUTS)
    return [record.peer_id for record in snapshot.records]


@pytest.mark.parametrize("in_cache", [False, True])
async def test_nothing_bad_is_stored(swarm: tuple[Peer, Peer], in_cache: bool) -> None:
    honest, hostile = swarm
    for what, subkey, value, expires in hostile_entries():
        assert not await send(hostile, honest, subkey, value, expires, in_cache), what
    plain = packed(entry(HOSTILE, time.time() + 90))
    assert not await send(hostile, honest, None, plain, time.time() + 90, in_cache)
    assert await readers_see(honest) == [HONEST.peer_id]
    for reason in (
        Rejection.BAD_SIGNATURE,
        Rejection.WRONG_KEY,
        Rejection.WRONG_SUBKEY,
        Rejection.EXPIRES_TOO_LATE,
        Rejection.TOO_LARGE,
        Rejection.MALFORMED,
        Rejection.PLAIN_VALUE,
    ):
        assert honest.validator.rejected[reason] > 0, reason


async def test_a_dictionary_with_bad_entries_is_stored_without_them(swarm: tuple[Peer, Peer]) -> None:
    honest, hostile = swarm
    expires = time.time() + 60
    dictionary = dictionary_of([(subkey, value, at) for _, subkey, value, at in hostile_entries() if subkey != 7])
    dictionary.data[HOSTILE.peer_id] = ValueWithExpiration(packed(entry(HOSTILE, expires)), expires)
    for broken in ({}, {"latest_expiration_time": math.inf}, {"maxsize": 1}):
        for name, value in broken.items():
            setattr(dictionary, name, value)
        await send(hostile, honest, None, dictionary, expires)
    assert sorted(await readers_see(honest)) == sorted([HONEST.peer_id, HOSTILE.peer_id])


async def test_bad_entries_hide_no_good_ones_from_a_reader(swarm: tuple[Peer, Peer], start_peer: StartPeer) -> None:
    """The hostile node answers with everything bad at once, under the key of an honest record."""
    honest, hostile = swarm
    reader = await start_peer(honest, hostile, client_only=True)
    view = SwarmView(reader)
    for what, subkey, value, expires in hostile_entries():
        hostile.node.protocol.storage = serving(dictionary_of([(subkey, value, expires)]), expires)
        snapshot = await view.refresh(ARTIFACT, N_LAYERS, CUTS)
        assert [record.peer_id for record in snapshot.records] == [HONEST.peer_id], what
    assert view.rejected[Rejection.BAD_SIGNATURE] > 0
    assert view.rejected[Rejection.WRONG_KEY] > 0
    assert snapshot.dropped > 0


async def test_a_lying_dictionary_neither_hides_others_nor_hangs_the_search(swarm: tuple[Peer, Peer]) -> None:
    honest, hostile = swarm
    expires = time.time() + 60
    for maxsize, latest in product([1, 0, -1, math.nan, "x", None], [math.inf, math.nan, "x", None]):
        dictionary = dictionary_of([(HOSTILE.peer_id, packed(entry(HOSTILE, expires)), expires)])
        dictionary.maxsize, dictionary.latest_expiration_time = maxsize, latest
        hostile.node.protocol.storage = serving(dictionary, math.inf)
        honest.node.blacklist.clear()
        assert HONEST.peer_id in await readers_see(honest), (maxsize, latest)
        answer = await honest.node.protocol.call_find(PeerID.from_base58(hostile.peer_id), [KEY_ID])
        if answer is not None and answer[KEY_ID][0] is not None:
            found = answer[KEY_ID][0]
            assert (found.expiration_time, found.value.maxsize) == (expires, math.inf), (maxsize, latest)


async def test_an_entry_that_expired_by_the_readers_clock_hides_no_other(start_peer: StartPeer) -> None:
    """No hostility needed: clocks differ, and an honest node returns what is good by its own."""
    honest = await start_peer(identity=HONEST)
    reader = await start_peer(honest, clock=lambda: time.time() + 10)
    now = time.time()
    for author, expires in ((HONEST, now + 60), (HOSTILE, now + 9)):
        honest.node.protocol.storage.store_subkey(KEY_ID, author.peer_id, packed(entry(author, expires)), expires)
    assert await readers_see(reader) == [HONEST.peer_id]
    assert reader.validator.rejected[Rejection.EXPIRED] == 1


async def test_a_plain_value_does_not_replace_the_dictionary(swarm: tuple[Peer, Peer]) -> None:
    honest, hostile = swarm
    hostile.node.protocol.storage = serving(packed(b"plain"), time.time() + 500)
    assert await readers_see(honest) == [HONEST.peer_id]


async def test_ten_thousand_subkeys_are_read_in_bounded_time(swarm: tuple[Peer, Peer]) -> None:
    honest, hostile = swarm
    expires = time.time() + 60
    value = packed(entry(HOSTILE, expires))
    flood = [(f"{number:05}", value[:300], expires) for number in range(10_000)]
    hostile.node.protocol.storage = serving(dictionary_of(flood), expires)
    before = time.process_time()
    assert await readers_see(honest) == [HONEST.peer_id]
    assert time.process_time() - before < 5
    assert sum(honest.validator.rejected.values()) <= MAX_ENTRIES_PER_KEY


async def test_an_old_record_sent_again_does_not_shorten_the_new_ones_life(swarm: tuple[Peer, Peer]) -> None:
    honest, hostile = swarm
    now = time.time()
    old, new = now + 1, now + 120
    assert await honest.table.write([Entry(KEY, entry(HONEST, new), new)]) == 1
    await send(hostile, honest, HONEST.peer_id, packed(entry(HONEST, old)), old)
    found = honest.node.protocol.storage.get(KEY_ID)
    assert found.value.key_to_heap[HONEST.peer_id].expiration_time == new


def test_a_full_key_keeps_what_it_has() -> None:
    storage = BoundedStorage()
    expires = time.time() + 60
    for number in range(10_000):
        storage.store_subkey(KEY_ID, str(number), bytes(900), expires + number)
    held = storage.get(KEY_ID).value
    assert "0" in held and len(held) <= MAX_ENTRIES_PER_KEY
    assert sum(len(item.value) for _, item in held.items()) <= MAX_KEY_BYTES
    assert storage.store_subkey(KEY_ID, "0", b"y" * 900, expires + 1e4)  # a known one is still renewed
    assert not storage.store_subkey(KEY_ID, "another", b"x" * 900, expires)
    assert storage.get(KEY_ID).value.get("0").value == b"y" * 900


def test_the_whole_storage_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.guard.MAX_STORAGE_BYTES", 1 << 20)
    storage = BoundedStorage()
    expires = time.time() + 60
    stored = sum(storage.store_subkey(DHTID(number), "peer", bytes(900), expires) for number in range(3000))
    assert stored == (1 << 20) // 1000


def test_room_comes_back_when_entries_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.guard.MAX_STORAGE_BYTES", 100_000)
    storage = BoundedStorage()
    now = time.time()
    while storage.store_subkey(DHTID(len(storage)), "peer", bytes(900), now + 10):
        pass
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now + 20)
    tries = [storage.store_subkey(DHTID(number), "peer", bytes(900), now + 30) for number in range(300)]
    assert any(tries)


async def test_more_than_a_message_is_handed_over_in_parts(start_peer: StartPeer) -> None:
    """A newcomer gets what it should hold. hivemind sends it at once, and drops the newcomer when that is too much."""
    first = await start_peer()
    now = time.time()
    expires = now + 300
    for number in range(1500):  # 5.6 MB
        identity = Identity.ephemeral()
        place = Place(Kind.SPAN, ARTIFACT, number % 8)
        sealed = seal(identity, place, expires, bytes(3800))
        key_id = DHTID.from_bytes(key_hash(place.key))
        first.node.protocol.storage.store_subkey(key_id, identity.peer_id, packed(sealed), expires)
    held = {key: len(item.value) for key, item in first.node.protocol.storage.items()}
    second = await start_peer(first)
    remote = PeerID.from_base58(second.peer_id)
    items = list(first.node.protocol.storage.items())
    keys, values, expiries = zip(*((key, item.value, item.expiration_time) for key, item in items), strict=True)
    stored = await first.node.protocol.call_store(remote, keys, values, expiries)
    assert stored == [True] * len(items)
    assert {key: len(second.node.protocol.storage.get(key).value) for key in held} == held


def dictionary_of(entries: Sequence[tuple[Any, bytes, float]]) -> DictionaryDHTValue:
    """Past ``store``, which compares subkeys of any type with each other."""
    dictionary = DictionaryDHTValue()
    dictionary.data.update({subkey: ValueWithExpiration(value, expires) for subkey, value, expires in entries})
    return dictionary


class serving:  # noqa: N801
    """A storage that answers one question, with what no storage would hold."""

    def __init__(self, value: object, expires: float) -> None:
        self._answer = ValueWithExpiration(value, expires)

    def get(self, key: DHTID) -> Any:
        return self._answer if key == KEY_ID else None

    def items(self) -> list[Any]:
        return []


def find_request(keys: Sequence[bytes]) -> bytes:
    data: bytes = dht_pb2.FindRequest(keys=keys, peer=dht_pb2.NodeInfo(node_id=bytes(20))).SerializeToString()
    return data


GREEDY = {
    "more keys than one asks for": find_request([place.to_bytes(20, "big") for place in range(MAX_KEYS_ASKED + 1)]),
    "a hundred thousand keys": find_request([os.urandom(20) for _ in range(100_000)]),
    "the same key twice": find_request([KEY_ID.to_bytes()] * 2),
}


@pytest.mark.parametrize("kind", GREEDY)
async def test_who_asks_for_too_much_gets_nothing(swarm: tuple[Peer, Peer], kind: str) -> None:
    """Each key may bring 384 KiB, so that one request could take all memory."""
    honest, hostile = swarm
    ask = hostile.p2p._client.control.call_unary_handler
    with pytest.raises(P2PHandlerError, match=r"over the limit|each only once"):
        await ask(honest.p2p.peer_id, "DHTProtocol.rpc_find", GREEDY[kind])
    answer = await ask(honest.p2p.peer_id, "DHTProtocol.rpc_find", find_request([KEY_ID.to_bytes()]))
    assert len(dht_pb2.FindResponse.FromString(answer).results) == 1


@pytest.mark.parametrize("method", ["rpc_ping", "rpc_store"])
async def test_requests_of_an_odd_size_are_not_read(swarm: tuple[Peer, Peer], method: str) -> None:
    honest, hostile = swarm
    ask = hostile.p2p._client.control.call_unary_handler
    with pytest.raises(P2PHandlerError, match="over the limit"):
        await ask(honest.p2p.peer_id, f"DHTProtocol.{method}", bytes(3 << 20))


@pytest.mark.parametrize("kind", [dht_pb2.PingRequest, dht_pb2.FindRequest, dht_pb2.StoreRequest])
async def test_an_odd_node_id_is_refused_and_no_news(
    swarm: tuple[Peer, Peer], caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    honest, hostile = swarm
    request = kind(peer=dht_pb2.NodeInfo(node_id=bytes(3000)))
    method = f"DHTProtocol.rpc_{kind.__name__.removesuffix('Request').lower()}"
    with pytest.raises(P2PHandlerError, match="wrong length"):
        await hostile.p2p._client.control.call_unary_handler(honest.p2p.peer_id, method, request.SerializeToString())
    assert await measure(hostile) is not None
    gc.collect()
    assert caplog.text == ""

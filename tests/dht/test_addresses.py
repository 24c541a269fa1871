from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.addresses import (
    announceable,
    loopback_last,
    parse_listen_address,
    parse_peer_address,
    parse_peers,
    transport_of,
)
from dht.errors import BadAddress

WHO = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
OTHER = "12D3KooWRJNa1Ez1DVqp8mbtYMmVE9z6ZKWMyTCtMPRcEipKZM6k"


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/192.0.2.7/tcp/4001/p2p/{WHO}",
        f"/ip6/2001:db8::7/tcp/4001/p2p/{WHO}",
        f"/dns4/node.example.org/tcp/4001/p2p/{WHO}",
        f"/ip4/192.0.2.7/udp/4001/quic-v1/p2p/{WHO}",
        f"/ip4/192.0.2.7/tcp/4001/p2p/{OTHER}/p2p-circuit/p2p/{WHO}",
    ],
)
def test_addresses_of_peers(text: str) -> None:
    parsed = parse_peer_address(f" {text}\n")
    assert str(parsed) == text
    assert parsed.peer_id == WHO


@pytest.mark.parametrize(
    "text",
    [
        "",
        "192.0.2.7:4001",
        "/ip4/192.0.2.7/tcp/4001",
        f"/p2p/{WHO}",
        f"/ip4/192.0.2.7/p2p/{WHO}",
        f"/ip4/192.0.2.777/tcp/4001/p2p/{WHO}",
        f"/ip4/2001:db8::7/tcp/4001/p2p/{WHO}",
        f"/ip4/0.0.0.0/tcp/4001/p2p/{WHO}",
        f"/ip4/192.0.2.7/tcp/0/p2p/{WHO}",
        f"/ip4/192.0.2.7/tcp/65536/p2p/{WHO}",
        f"/dns4/-bad/tcp/4001/p2p/{WHO}",
        f"/ip4/192.0.2.7/tcp/4001/p2p/{WHO[:-10]}",
        f"/ip4/192.0.2.7/tcp/4001/p2p/{WHO[:-1]}0",
        f"/ip4/192.0.2.7/tcp/4001{'/x' * 300}/p2p/{WHO}",
    ],
)
def test_bad_addresses_of_peers(text: str) -> None:
    with pytest.raises(BadAddress, match=r"is not the address of a peer; use /ip4/HOST/tcp/PORT/p2p/PEER_ID"):
        parse_peer_address(text)


@given(st.text(max_size=80))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_peer_address, parse_listen_address, parse_peers):
        try:
            parse(text)
        except BadAddress as error:
            assert "\n" not in str(error)


def test_a_list_of_peers() -> None:
    one, two = f"/ip4/192.0.2.7/tcp/1/p2p/{WHO}", f"/ip4/192.0.2.8/tcp/1/p2p/{OTHER}"
    assert parse_peers(f"{one},{two},\n {one} ") == (one, two)
    assert parse_peers("") == ()
    with pytest.raises(BadAddress):
        parse_peers(f"{one};{two}")


@pytest.mark.parametrize("text", ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/4001", "/ip4/127.0.0.1/udp/4001/quic-v1"])
def test_addresses_to_listen_on(text: str) -> None:
    assert parse_listen_address(text).text == text


@pytest.mark.parametrize(
    "text",
    ["", "4001", "/ip4/0.0.0.0", "/ip4/0.0.0.0/tcp/65536", "/ip4/0.0.0.0/udp/1", "/ip4/::/tcp/1", "/dns4/a/tcp/1"],
)
def test_bad_addresses_to_listen_on(text: str) -> None:
    with pytest.raises(BadAddress, match=r"can't be listened on; use /ip4/0\.0\.0\.0/tcp/PORT"):
        parse_listen_address(text)


def test_what_to_dial() -> None:
    assert transport_of(f"/ip4/192.0.2.7/tcp/1/p2p/{WHO}", WHO) == "/ip4/192.0.2.7/tcp/1"
    assert transport_of("/ip4/192.0.2.7/tcp/1", WHO) == "/ip4/192.0.2.7/tcp/1"
    assert transport_of(f"/ip4/192.0.2.7/tcp/1/p2p/{OTHER}", WHO) is None
    assert transport_of("/ip4/0.0.0.0/tcp/1", WHO) is None


def test_loopback_is_told_only_when_there_is_nothing_else() -> None:
    loopback, lan, v6 = f"/ip4/127.0.0.1/tcp/1/p2p/{WHO}", f"/ip4/192.0.2.7/tcp/1/p2p/{WHO}", "/ip6/::1/tcp/1"
    useless = ["/ip4/0.0.0.0/tcp/1", "/ip6/fe80::1/tcp/1"]
    assert announceable([loopback, lan, v6, *useless]) == (lan,)
    assert announceable([loopback, v6, *useless]) == (loopback, v6)
    assert announceable(useless) == ()
    assert loopback_last([loopback, lan, v6]) == [lan, loopback, v6]

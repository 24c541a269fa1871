"""Multiaddrs as text, checked without the network stack.

Full address of a peer: ``/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW...``; to listen on: ``/ip4/0.0.0.0/tcp/4001``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from dht.errors import BadAddress
from dht.peer_id import is_peer_id

PEER_FORM = "/ip4/HOST/tcp/PORT/p2p/PEER_ID"
LISTEN_FORM = "/ip4/0.0.0.0/tcp/PORT"
MAX_CHARS = 512

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True)
class PeerAddress:
    """``transport`` is what to dial, ``peer_id`` who must answer."""

    transport: str
    peer_id: str

    def __str__(self) -> str:
        return f"{self.transport}/p2p/{self.peer_id}"


@dataclass(frozen=True)
class ListenAddress:
    text: str
    host: IPv4Address | IPv6Address
    port: int
    is_tcp: bool


def parse_peer_address(text: str) -> PeerAddress:
    """Raises BadAddress unless ``text`` names a host, a port and a peer id."""
    transport, mark, peer_id = text.strip().rpartition("/p2p/")
    if not mark or not is_peer_id(peer_id) or not is_dialable(transport):
        raise BadAddress(f"{_shown(text)} is not the address of a peer; use {PEER_FORM}")
    return PeerAddress(transport, peer_id)


def parse_peers(text: str) -> tuple[str, ...]:
    """The peers in a list separated by commas or white space, without repetitions. Raises BadAddress."""
    parts = [part for part in re.split(r"[\s,]+", text) if part]
    return tuple(dict.fromkeys(str(parse_peer_address(part)) for part in parts))


def parse_listen_address(text: str) -> ListenAddress:
    """Raises BadAddress unless ``text`` is an IP address and a TCP port, or QUIC over a UDP port."""
    match = re.fullmatch(r"/(ip4|ip6)/([0-9A-Fa-f.:]+)/(tcp|udp)/(\d{1,5})(/quic-v1)?", text.strip())
    if match is None or (match[3] == "udp") != (match[5] is not None) or int(match[4]) > 65535:
        raise BadAddress(f"{_shown(text)} can't be listened on; use {LISTEN_FORM}")
    try:
        host = (IPv4Address if match[1] == "ip4" else IPv6Address)(match[2])
    except ValueError:
        raise BadAddress(f"{_shown(text)} can't be listened on; use {LISTEN_FORM}") from None
    return ListenAddress(text.strip(), host, int(match[4]), match[3] == "tcp")


def transport_of(text: str, peer_id: str) -> str | None:
    """What to dial for ``peer_id``, or None when ``text`` is unusable or names somebody else."""
    transport, mark, named = text.strip().rpartition("/p2p/")
    if not mark:
        transport, named = text.strip(), peer_id
    return transport if named == peer_id and is_dialable(transport) else None


def announceable(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses to tell others, in the order given.

    Unspecified and link-local ones help nobody. Loopback ones are told only when there is nothing else: a swarm on
    one machine.
    """
    useful = [address for address in addresses if not _is_useless(address)]
    public = [address for address in useful if not is_loopback(address)]
    return tuple(public or useful)


def is_loopback(address: str) -> bool:
    host = _ip_of(address)
    return host is not None and host.is_loopback


def loopback_last(addresses: Iterable[str]) -> list[str]:
    return sorted(addresses, key=is_loopback)


def _is_useless(address: str) -> bool:
    host = _ip_of(address)
    return host is not None and (host.is_unspecified or host.is_link_local)


def _ip_of(address: str) -> IPv4Address | IPv6Address | None:
    match = re.match(r"/ip[46]/([^/]+)", address)
    if match is None:
        return None
    try:
        return ip_address(match[1])
    except ValueError:
        return None


def is_dialable(transport: str) -> bool:
    """``/ip4|ip6|dns.../HOST/tcp|udp/PORT`` and, after it, whatever libp2p makes of it (quic-v1, a relay)."""
    match = re.match(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/(?:tcp|udp)/(\d{1,5})(?:/[A-Za-z0-9._~-]+)*\Z", transport)
    if match is None or len(transport) > MAX_CHARS or not 1 <= int(match[3]) <= 65535:
        return False
    kind, host = match[1], match[2]
    if kind.startswith("dns"):
        return len(host) <= 253 and _HOST_NAME.fullmatch(host) is not None
    found = _ip_of(transport)
    return found is not None and (kind == "ip4") == isinstance(found, IPv4Address) and not found.is_unspecified


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")

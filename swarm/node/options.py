"""Texts given on the command line, as values. Each function raises ``UsageError`` with the option and an example."""

from __future__ import annotations

import re

from dht.addresses import is_dialable, parse_listen_address
from dht.errors import BadAddress
from shim.types import KvType
from swarm.errors import UsageError
from swarm.node.config import HostPort

MAX_PORT = 65535
MAX_CHUNK_TOKENS = 1 << 14
_KV_TYPES = {"f32": KvType.F32, "f16": KvType.F16, "q8_0": KvType.Q8_0}
KV_TYPES = tuple(_KV_TYPES)


def kv_type(text: str) -> KvType:
    if text.lower() not in _KV_TYPES:
        raise UsageError(f"--kv-type {text}: not known; choose one of {', '.join(KV_TYPES)}")
    return _KV_TYPES[text.lower()]


def listen_multiaddr(text: str) -> str:
    """``HOST:PORT``, ``:PORT``, ``PORT``, ``[IPV6]:PORT`` or a multiaddr."""
    address = text if text.startswith("/") else _from_host_port(text)
    try:
        return parse_listen_address(address).text
    except BadAddress as error:
        raise UsageError(f"--listen {text}: {error}") from error


def announce_multiaddr(text: str) -> str:
    """A multiaddr that others can dial: a host or IP address, and a port that is not 0."""
    if not is_dialable(text.strip().partition("/p2p/")[0]):
        raise UsageError(
            f"--announce-maddrs {text}: nobody can dial that; write for example --announce-maddrs "
            "/ip4/203.0.113.9/tcp/4001, with the address and port that others see"
        )
    return text.strip()


def metrics_address(text: str) -> HostPort:
    """``HOST:PORT``, ``[IPV6]:PORT``, or a port of the loopback alone: who the numbers are for sits at this machine."""
    match = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+)):)?(\d{1,5})", text)
    if match is None or int(match[3]) > MAX_PORT:
        raise UsageError(f"--metrics {text}: not HOST:PORT; write for example --metrics 127.0.0.1:9464")
    return HostPort(match[1] or match[2] or "127.0.0.1", int(match[3]))


def seconds(option: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UsageError(f"{option} {value:g}: not a time; choose a number of seconds, for example {option} 600")
    return value


def _from_host_port(text: str) -> str:
    match = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:]+)\]|([0-9.]*)):)?(\d{1,5})", text)
    if match is None:
        raise UsageError(f"--listen {text}: not HOST:PORT with an IP address; write for example --listen 0.0.0.0:4001")
    if match[1]:
        return f"/ip6/{match[1]}/tcp/{match[3]}"
    return f"/ip4/{match[2] or '0.0.0.0'}/tcp/{match[3]}"


def count(option: str, value: int | None, low: int, high: int) -> int | None:
    if value is not None and not low <= value <= high:
        raise UsageError(f"{option} {value}: out of range; choose {low} to {high}")
    return value

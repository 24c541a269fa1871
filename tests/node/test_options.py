"""Texts of the command line, and what the operator reads when they are wrong."""

from __future__ import annotations

import pytest

from shim.types import ContextSpec, KvType
from swarm.errors import UsageError
from swarm.node import options
from swarm.node.config import HostPort
from swarm.node.slots import bounded, chunk_within_stall, default_slots, parse_slots

PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWSHj3RRbBjD15g6wekV8y3mm57Pobmps2g2WJm6F67Lay"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:4001", "/ip4/127.0.0.1/tcp/4001"),
        (":4001", "/ip4/0.0.0.0/tcp/4001"),
        ("4001", "/ip4/0.0.0.0/tcp/4001"),
        ("[::]:4001", "/ip6/::/tcp/4001"),
        ("/ip4/10.0.0.1/udp/4001/quic-v1", "/ip4/10.0.0.1/udp/4001/quic-v1"),
    ],
)
def test_listen(text: str, expected: str) -> None:
    assert options.listen_multiaddr(text) == expected


@pytest.mark.parametrize("text", ["example.org:1", "1.2.3.4", "1.2.3.4:99999", "1.2.3.400:5", "/dns/x/tcp/1", ""])
def test_bad_listen(text: str) -> None:
    with pytest.raises(UsageError, match="--listen"):
        options.listen_multiaddr(text)


@pytest.mark.parametrize(
    "text", ["/ip4/203.0.113.9/tcp/4001", "/dns4/node.example/tcp/4001", f"/ip6/2001:db8::1/tcp/1/p2p/{PEER[-52:]}"]
)
def test_announced(text: str) -> None:
    assert options.announce_multiaddr(f" {text} ") == text


@pytest.mark.parametrize(
    "text", ["203.0.113.9:4001", "/ip4/203.0.113.9", "/ip4/0.0.0.0/tcp/4001", "/ip4/1.2.3.4/tcp/0"]
)
def test_what_nobody_can_dial_is_not_announced(text: str) -> None:
    with pytest.raises(UsageError, match=r"--announce-maddrs .*: nobody can dial that; write for example"):
        options.announce_multiaddr(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("9464", "127.0.0.1", 9464),
        ("0.0.0.0:9464", "0.0.0.0", 9464),
        ("[::1]:0", "::1", 0),
        ("metrics.example:80", "metrics.example", 80),
    ],
)
def test_metrics(text: str, host: str, port: int) -> None:
    assert options.metrics_address(text) == HostPort(host, port)


@pytest.mark.parametrize("text", ["", ":9464", "a:b", "70000", "http://localhost:9464", "::1:80", "host:"])
def test_bad_metrics(text: str) -> None:
    with pytest.raises(UsageError, match=r"--metrics .*; write for example --metrics 127.0.0.1:9464"):
        options.metrics_address(text)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_no_time(value: float) -> None:
    with pytest.raises(UsageError, match=r"--idle-seconds .*; choose a number of seconds"):
        options.seconds("--idle-seconds", value)


def test_slots() -> None:
    assert parse_slots("8x4096, 2x64k") == (ContextSpec(8, 4096), ContextSpec(2, 65536))


@pytest.mark.parametrize(
    "text", ["", "8", "x4096", "0x4096", "8x10", "999x4096", "1x4096,,", "1x200000", "1x256,1x256,1x256,1x256"]
)
def test_bad_slots(text: str) -> None:
    with pytest.raises(UsageError, match="--slots"):
        parse_slots(text)


def test_slots_end_where_the_engine_is_right() -> None:
    assert parse_slots("1x128k") == (ContextSpec(1, 131_072),)
    with pytest.raises(UsageError, match="131073 tokens a slot, and the engine computes correctly up to 131072"):
        parse_slots("4x256,1x131073")


def test_slots_end_where_the_training_ended() -> None:
    with pytest.raises(UsageError, match="2048"):
        bounded((ContextSpec(1, 4096),), 2048)
    assert next(iter(default_slots(2048))) == (ContextSpec(4, 2048),)


def test_default_slots_shrink() -> None:
    sums = [sum(spec.slots * spec.tokens for spec in specs) for specs in default_slots(1 << 20)]
    assert sums[0] == 4 * 4096
    assert sums == sorted(sums, reverse=True)


@pytest.mark.parametrize(("speed", "chunk"), [(10_000.0, 512), (300.0, 256), (40.0, 32), (1.0, 32)])
def test_a_chunk_takes_about_a_second(speed: float, chunk: int) -> None:
    assert chunk_within_stall(speed, 512) == chunk


def test_kv_type() -> None:
    assert options.kv_type("Q8_0") == KvType.Q8_0
    with pytest.raises(UsageError, match="f16"):
        options.kv_type("int3")

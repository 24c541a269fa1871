"""Hosts of our own: network namespaces with an address each, joined by a bridge that lives in one of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

SUBNET = "10.203.77"


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """Put before a command, runs it on this host."""
        return ["ip", "netns", "exec", self.namespace]


def require_namespaces() -> None:
    """Skip where namespaces can't be made; never where the suite must run whole."""
    able = os.geteuid() == 0 and shutil.which("ip") is not None
    if not able and not os.environ.get("CI"):
        pytest.skip("making network namespaces needs root and iproute2")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Yield ``count`` hosts that reach each other and nothing else; all is removed at the end."""
    tag = f"swarm{os.getpid()}"
    switch = f"{tag}-sw"
    made: list[str] = []
    try:
        for namespace in (switch, *(f"{tag}-{i}" for i in range(count))):
            _ip("netns", "add", namespace)
            made.append(namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        yield [_plug_in(switch, f"{tag}-{i}", i) for i in range(count)]
    finally:
        for namespace in reversed(made):
            _ip("netns", "delete", namespace)


def _plug_in(switch: str, namespace: str, number: int) -> Host:
    address = f"{SUBNET}.{number + 1}"
    _ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
    _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "eth0", "up")
    _ip("-n", namespace, "route", "add", "default", "dev", "eth0")
    return Host(namespace, address)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)

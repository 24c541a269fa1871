"""What the tests of dht/ share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from dht.peer import Peer
from dht.record import NodeState, SpanRecord
from dht.view import SwarmView

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ARTIFACT = "ab" * 32
N_LAYERS = 12
CUTS = tuple(range(N_LAYERS + 1))

StartPeer = Callable[..., Awaitable[Peer]]


def span_record(peer_id: str, first: int = 0, last: int = N_LAYERS, **fields: Any) -> SpanRecord:
    described: dict[str, Any] = {
        "artifact_id": ARTIFACT,
        "artifact_name": "tiny",
        "n_layers": N_LAYERS,
        "state": NodeState.ONLINE,
        "protocol_version": 1,
        "numerics_id": "test/x86-64/f16",
        "chunk_tokens": 64,
    }
    return SpanRecord(peer_id=peer_id, first=first, last=last, **(described | fields))


def daemons() -> list[int]:
    return [child.pid for child in psutil.Process().children() if child.name() == "p2pd"]


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 20.0) -> None:
    """Waits for a state; the limit is only there to end a failing test."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


async def spans_seen(peer: Peer) -> list[tuple[int, int]]:
    snapshot = await SwarmView(peer).refresh(ARTIFACT, N_LAYERS, CUTS)
    return [(record.first, record.last) for record in snapshot.records]

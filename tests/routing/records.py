"""Span records for the tests of placement and routing."""

from __future__ import annotations

from typing import Any

from dht.record import LinkRtt, NodeState, SlotClass, SpanRecord

ARTIFACT = "a" * 64
OTHER_ARTIFACT = "b" * 64
NUMERICS = "0123456789abcdef/x86-64-v3/f16"
N_LAYERS = 10
CUTS = tuple(range(N_LAYERS + 1))
GLM_CUTS = (0, 1, 2, 6, 10)


def record(peer_id: str, first: int, last: int, **changes: Any) -> SpanRecord:
    """An online node with one free slot of 4096 tokens; ``links`` may be given as a dict."""
    links = changes.pop("links", {})
    values: dict[str, Any] = {
        "peer_id": peer_id,
        "artifact_id": ARTIFACT,
        "n_layers": N_LAYERS,
        "first": first,
        "last": last,
        "state": NodeState.ONLINE,
        "protocol_version": 1,
        "numerics_id": NUMERICS,
        "slots": (SlotClass(tokens=4096, total=1, free=1),),
        "chunk_tokens": 512,
        "links": tuple(LinkRtt(peer_id=other, seconds=seconds) for other, seconds in links.items()),
    }
    return SpanRecord(**{**values, **changes})


def slots(*classes: tuple[int, int, int]) -> tuple[SlotClass, ...]:
    """(tokens, total, free) of each class."""
    return tuple(SlotClass(tokens=tokens, total=total, free=free) for tokens, total, free in classes)

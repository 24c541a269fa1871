"""Where things are in the DHT: one key per artifact and cut segment, and one that lists the artifacts."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence

ARTIFACTS_KEY = "glm-swarm/1/artifacts"


def segment_key(artifact_id: str, segment_first: int) -> str:
    """The key under which every node that covers the segment starting at this layer announces itself."""
    return f"glm-swarm/1/span/{artifact_id}/{segment_first}"


def key_bytes(key: str) -> bytes:
    """The form given to hivemind, which hashes bytes as they are and would msgpack a str first."""
    return key.encode()


def key_hash(key: str) -> bytes:
    """What the network knows a key by; hivemind uses SHA-1."""
    return hashlib.sha1(key_bytes(key), usedforsecurity=False).digest()


def segments(first: int, last: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """First layers of the cut segments in ``[first, last)``. ``cuts`` ascends and holds both ends of the model.

    Raises ValueError when the span is empty or does not start and end at cuts.
    """
    start, stop = bisect_left(cuts, first), bisect_left(cuts, last)
    if not (start < stop < len(cuts) and cuts[start] == first and cuts[stop] == last):
        raise ValueError(f"[{first}, {last}) does not start and end at cuts")
    return tuple(cuts[start:stop])

"""Checks of single fields. Each raises ``WireError``: TOO_LARGE or MALFORMED."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from swarm.protocol import limits
from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.wire_errors import WireError

_HEX = frozenset("0123456789abcdef")


def malformed(text: str) -> WireError:
    return WireError(pb.MALFORMED, text)


def between(name: str, value: float, low: float, high: float) -> None:
    # a NaN fails both comparisons
    if not low <= value <= high:
        raise malformed(f"{name} is {value:g}, must be {low:g} to {high:g}")


def count(name: str, values: Sequence[object], limit: int) -> None:
    if len(values) > limit:
        raise WireError(pb.TOO_LARGE, f"{name} has {len(values)} entries, at most {limit} are allowed")


def text(name: str, value: str, limit: int = limits.MAX_TEXT) -> None:
    if len(value) > limit:
        raise WireError(pb.TOO_LARGE, f"{name} has {len(value)} characters, at most {limit} are allowed")


def finite(name: str, values: Iterable[float]) -> None:
    # f32 values can't overflow a sum of doubles, and NaN or infinities can't leave it
    if not math.isfinite(sum(values)):
        raise malformed(f"{name} holds values that are not finite")


def known(name: str, value: int, known: tuple[int, ...]) -> None:
    if value not in known:
        raise malformed(f"{name} is {value}, which is not known")


def session_id(value: bytes) -> None:
    if len(value) != limits.SESSION_ID_BYTES:
        raise malformed(f"session_id has {len(value)} bytes, must have {limits.SESSION_ID_BYTES}")


def epoch(value: int) -> None:
    if value < 1:
        raise malformed("epoch is 0, epochs start at 1")


def position(name: str, value: int) -> None:
    between(name, value, 0, limits.MAX_CONTEXT_TOKENS)


def artifact_id(value: str) -> None:
    if len(value) != 64 or not _HEX.issuperset(value):
        raise malformed("artifact_id is not 64 lower-case hex digits")


def peer_id(name: str, value: str) -> None:
    if not 1 <= len(value) <= limits.MAX_PEER_ID or not (value.isascii() and value.isalnum()):
        raise malformed(f"{name} is not a base58 peer id")


def layers(name: str, layers: pb.Layers) -> None:
    if not layers.first < layers.last <= limits.MAX_LAYERS:
        raise malformed(f"{name} is {layers.first}:{layers.last}, must be first < last <= {limits.MAX_LAYERS}")


def token_ids(name: str, ids: Sequence[int]) -> None:
    if ids and max(ids) > limits.MAX_TOKEN_ID:
        raise malformed(f"{name} holds {max(ids)}, token ids end at {limits.MAX_TOKEN_ID}")


def neighbour(name: str, neighbour: pb.Neighbour) -> None:
    peer_id(f"{name}.peer_id", neighbour.peer_id)
    count(f"{name}.addresses", neighbour.addresses, limits.MAX_ADDRESSES)
    for address in neighbour.addresses:
        text(f"{name}.addresses", address)


def neighbours(message: pb.Open | pb.Reroute) -> None:
    if not message.HasField("predecessor"):
        raise malformed("predecessor is missing")
    neighbour("predecessor", message.predecessor)
    if message.HasField("successor"):
        neighbour("successor", message.successor)


def part(name: str, offset: int, n_bytes: int, total: int, limit: int) -> None:
    if total > limit:
        raise WireError(pb.TOO_LARGE, f"{name} has {total} bytes, at most {limit} are allowed")
    if offset + n_bytes > total:
        raise malformed(f"{name} has {total} bytes, the part ends at {offset + n_bytes}")
    if n_bytes == 0 and offset != total:
        raise malformed(f"a part of {name} is empty")


def timings(timings: Sequence[pb.HopTiming]) -> None:
    count("timings", timings, limits.MAX_HOPS)
    for timing in timings:
        between("timings.hop_index", timing.hop_index, 0, limits.MAX_HOPS - 1)

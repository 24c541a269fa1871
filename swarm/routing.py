"""Which peers a session runs through.

The idea: a chain only moves forward through the layers, so one pass over the positions in order finds the shortest one.
A hop may use part of a node's span; two neighbours hand over where one of their spans starts or ends, because the time
of two peers is linear in the layer they hand over at, and so smallest at an edge.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from dht.record import NodeState, SpanRecord
from swarm.errors import ContextExceeded, NoRoute, SwarmError
from swarm.protocol.limits import PROTOCOL_VERSION

Span: TypeAlias = tuple[int, int]
Edge: TypeAlias = tuple[str, str]  # peer ids in the direction of the steps; the client's is ""

CLIENT = ""
DEFAULT_LAYER_SECONDS = 0.005  # when no peer has measured its speed
DEFAULT_RTT_SECONDS = 0.02  # of a pair that has not been measured
HOP_SECONDS = 0.0015  # queueing, frames and IPC of one more hop
SCARCE_SLOT_SECONDS = 0.002  # extra for a peer's last slot, half of it for the one before, ...
SPREAD = 0.05  # how far a seed moves a peer's cost, as a share of it
_MAX_NUMERICS = 8  # groups tried for a chain of one numerics id; records can claim any number of them
# bounds of the search in a large swarm; below them it is exact
_MAX_LABELS = 8  # partial chains kept for each last peer
_MAX_ARRIVED = 64  # partial chains that are continued at a position
_MAX_PEERS = 256
_MAX_COMMANDS = 3  # in an error text


@dataclass(frozen=True)
class Hop:
    """One peer and the layers it runs, inside its span."""

    peer_id: str
    first: int
    last: int
    record: SpanRecord


@dataclass(frozen=True)
class Chain:
    """Hops in order that cover every layer. ``cost`` is the estimated seconds of one decode step."""

    hops: tuple[Hop, ...]
    cost: float
    context_tokens: int  # the smallest of the hops' slots that would be booked

    @property
    def chunk_tokens(self) -> int:
        """The prefill chunk every hop takes."""
        return min(hop.record.chunk_tokens for hop in self.hops)

    @property
    def numerics_ids(self) -> frozenset[str]:
        return frozenset(hop.record.numerics_id for hop in self.hops)

    def __str__(self) -> str:
        return " -> ".join(f"{hop.record.public_name or hop.peer_id[-8:]}[{hop.first}:{hop.last}]" for hop in self.hops)


@dataclass(frozen=True)
class JoinHint:
    """What the command in an error text names: the model, and where to join."""

    model: str = "MODEL"
    peers: tuple[str, ...] = ()

    def command(self, first: int, last: int) -> str:
        peers = self.peers[0] if self.peers else "ADDRESS"
        return f"swarm-node --model {self.model} --layers {first}:{last} --initial-peers {peers}"


@dataclass(frozen=True)
class Gap:
    """Layers [first, last) of a chain, between the peers ``before`` and ``after`` that stay where they are."""

    first: int
    last: int
    before: str = CLIENT
    after: str = CLIENT


@dataclass(frozen=True)
class RouteRequest:
    """What the chain must satisfy, and what the client knows beside the records."""

    legal_cuts: tuple[int, ...]
    artifact_id: str
    context_tokens: int
    banned: frozenset[str] = frozenset()
    banned_edges: frozenset[Edge] = frozenset()
    numerics_id: str | None = None  # the session's, once it has one
    client_rtt_seconds: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None  # moves equally good choices, so that clients spread over the peers
    hint: JoinHint = JoinHint()
    protocol_version: int = PROTOCOL_VERSION
    gap: Gap | None = None  # None: a chain through every layer

    @property
    def n_layers(self) -> int:
        return self.legal_cuts[-1]

    @property
    def ends(self) -> Gap:
        return self.gap or Gap(0, self.n_layers)


@dataclass(frozen=True)
class Skipped:
    """A record that can't be used, and why. ``slot_tokens`` is its largest free slot when only that was too small."""

    record: SpanRecord
    reason: str
    kind: str
    slot_tokens: int = 0


INVALID, OTHER, AWAY, BANNED, FULL, SMALL = "invalid", "other", "away", "banned", "full", "small"


def route(records: Sequence[SpanRecord], request: RouteRequest) -> Chain:
    """The chain with the fewest hops of a foreign ``numerics_id``, then the least time for a decode step.

    Without a session's id, a chain of any one id is preferred to a mixed one. Raises ``NoRoute``, or
    ``ContextExceeded`` when only smaller slots stand in the way.
    """
    usable, skipped = sort_records(records, request)
    chain = _best(usable, request)
    if chain is None:
        raise _no_route(usable, skipped, request)
    return chain


def sort_records(
    records: Sequence[SpanRecord], request: RouteRequest
) -> tuple[tuple[SpanRecord, ...], tuple[Skipped, ...]]:
    """Records a chain may use, one per peer, by peer id; and the others with the reason."""
    usable: list[SpanRecord] = []
    skipped: list[Skipped] = []
    latest = {record.peer_id: record for record in records}
    for _, record in sorted(latest.items()):
        refusal = _refusal(record, request)
        if refusal is None and len(usable) < _MAX_PEERS:
            usable.append(record)
        else:
            skipped.append(refusal or Skipped(record, f"more than {_MAX_PEERS} peers", OTHER))
    return tuple(usable), tuple(skipped)


def invalid_count(records: Sequence[SpanRecord], request: RouteRequest) -> int:
    """Records of this artifact that claim a span it can't be cut into."""
    return sum(skip.kind == INVALID for skip in sort_records(records, request)[1])


def explain(records: Sequence[SpanRecord], request: RouteRequest) -> list[str]:
    """The chosen chain, what it becomes without each of its peers, and why the other records were left out."""
    usable, skipped = sort_records(records, request)
    best = _best(usable, request)
    if best is None:
        lines = [f"no chain: {_no_route(usable, skipped, request)}"]
    else:
        lines = [f"chosen: {best}  {_parts(best, usable, request)}"]
        lines += _alternatives(best, usable, request)
    return lines + [f"not used: {_name(skip.record)} {_layers(skip.record)}: {skip.reason}" for skip in skipped]


# --- which records ------------------------------------------------------------------------------------------------


def _refusal(record: SpanRecord, request: RouteRequest) -> Skipped | None:
    if record.artifact_id != request.artifact_id:
        return Skipped(record, "serves another artifact", OTHER)
    if record.protocol_version != request.protocol_version:
        reason = f"speaks protocol {record.protocol_version}, this program {request.protocol_version}"
        return Skipped(record, reason, OTHER)
    if record.n_layers != request.n_layers or not _is_legal(record, request.legal_cuts):
        return Skipped(record, "its span starts or ends where this model may not be cut", INVALID)
    if record.state is not NodeState.ONLINE:
        return Skipped(record, f"is {record.state}", AWAY)
    if record.peer_id in request.banned:
        return Skipped(record, "failed before and is left out for now", BANNED)
    return _slot_refusal(record, request.context_tokens)


def _is_legal(record: SpanRecord, cuts: Sequence[int]) -> bool:
    return record.first < record.last and record.first in cuts and record.last in cuts


def _slot_refusal(record: SpanRecord, context_tokens: int) -> Skipped | None:
    if _free_slot(record, context_tokens) is not None:
        return None
    if any(slots.total > 0 and slots.tokens >= context_tokens for slots in record.slots):
        return Skipped(record, "full: no free slot that is large enough", FULL)
    largest = max((slots.tokens for slots in record.slots if slots.total > 0), default=0)
    return Skipped(record, f"its slots hold {largest} tokens, {context_tokens} are needed", SMALL, largest)


def _free_slot(record: SpanRecord, context_tokens: int) -> int | None:
    """The smallest free slot that is large enough: the one the node books."""
    fitting = (slots.tokens for slots in record.slots if slots.free > 0 and slots.tokens >= context_tokens)
    return min(fitting, default=None)


# --- the search ---------------------------------------------------------------------------------------------------

_Key: TypeAlias = tuple[int, float, float]  # hops of a foreign numerics id, seconds, tie


@dataclass(frozen=True)
class _Label:
    """A partial chain. ``used`` are its peers, ``hops`` theirs with first and last layer."""

    key: _Key
    used: frozenset[str]
    hops: tuple[tuple[str, int, int], ...]
    before: str  # whom the first of them follows

    @property
    def peer_id(self) -> str:
        return self.hops[-1][0] if self.hops else self.before


class _Prices:
    """What a hop costs, in seconds of one decode step."""

    def __init__(self, usable: Sequence[SpanRecord], request: RouteRequest) -> None:
        self._records = {record.peer_id: record for record in usable}
        self._request = request
        measured = [_layer_seconds(record) for record in usable if record.decode_tokens_per_second > 0]
        self._neutral = statistics.median(measured) if measured else DEFAULT_LAYER_SECONDS
        self._links = {(record.peer_id, link.peer_id): link.seconds for record in usable for link in record.links}
        self._shares = {record.peer_id: _share(request.seed, record.peer_id) for record in usable}

    def compute(self, peer_id: str, n_layers: int) -> float:
        record = self._records[peer_id]
        seconds = _layer_seconds(record) if record.decode_tokens_per_second > 0 else self._neutral
        return n_layers * seconds * self._jitter(peer_id)

    def waiting(self, peer_id: str) -> float:
        """The steps before this one, and a little for a peer whose slots run out."""
        record = self._records[peer_id]
        needed = self._request.context_tokens
        free = sum(slots.free for slots in record.slots if slots.tokens >= needed)
        queue = record.queue * self.compute(peer_id, record.last - record.first)
        return HOP_SECONDS + queue + SCARCE_SLOT_SECONDS / free

    def network(self, sender: str, receiver: str) -> float:
        """One way."""
        if CLIENT in (sender, receiver):
            return self._request.client_rtt_seconds.get(sender or receiver, DEFAULT_RTT_SECONDS) / 2
        told = (self._links.get((sender, receiver)), self._links.get((receiver, sender)))
        # the longer one: a peer that wants more steps than it deserves would claim to be near everybody
        return max((seconds for seconds in told if seconds is not None), default=DEFAULT_RTT_SECONDS) / 2

    def tie(self, peer_id: str) -> float:
        return self._shares[peer_id]

    def _jitter(self, peer_id: str) -> float:
        return 1.0 if self._request.seed is None else 1.0 + SPREAD * self._shares[peer_id]


def _layer_seconds(record: SpanRecord) -> float:
    return 1 / (record.decode_tokens_per_second * (record.last - record.first))


def _share(seed: int | None, peer_id: str) -> float:
    digest = hashlib.sha256(f"{seed}/{peer_id}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


def _best(usable: Sequence[SpanRecord], request: RouteRequest) -> Chain | None:
    prices = _Prices(usable, request)
    ends = request.ends
    edges = {ends.first, ends.last}.union(*((record.first, record.last) for record in usable))
    best = _search(usable, request, prices, (edge for edge in edges if ends.first <= edge <= ends.last))
    if best is None and request.banned_edges:
        # a peer may be needed between two that can't reach each other, for any layer at all
        inside = (cut for cut in request.legal_cuts if ends.first <= cut <= ends.last)
        best = _search(usable, request, prices, inside)
    if best is None:
        return None
    records = {record.peer_id: record for record in usable}
    hops = tuple(Hop(peer_id, first, last, records[peer_id]) for peer_id, first, last in best.hops)
    slots = (_free_slot(hop.record, request.context_tokens) for hop in hops)
    return Chain(hops, best.key[1], min(tokens for tokens in slots if tokens is not None))


def _search(
    usable: Sequence[SpanRecord], request: RouteRequest, prices: _Prices, positions: Iterable[int]
) -> _Label | None:
    ordered = sorted(positions)
    found = (_Search(usable, request, prices, ordered, numerics_id).run() for numerics_id in _numerics(usable, request))
    return min((label for label in found if label is not None), key=lambda label: label.key, default=None)


def _numerics(usable: Iterable[SpanRecord], request: RouteRequest) -> list[str]:
    """The ids worth trying to build a whole chain of, the most common first."""
    if request.numerics_id:
        return [request.numerics_id]
    counted = Counter(record.numerics_id for record in usable)
    return sorted(counted, key=lambda numerics_id: (-counted[numerics_id], numerics_id))[:_MAX_NUMERICS]


class _Search:
    """One pass over the hand-over positions in order."""

    def __init__(
        self,
        usable: Sequence[SpanRecord],
        request: RouteRequest,
        prices: _Prices,
        positions: Sequence[int],
        numerics_id: str,
    ) -> None:
        self._usable = usable
        self._request = request
        self._prices = prices
        self._foreign = {record.peer_id: record.numerics_id != numerics_id for record in usable}
        self._positions = positions
        self._arrived: dict[int, list[_Label]] = {position: [] for position in positions}

    def run(self) -> _Label | None:
        ends = self._request.ends
        self._arrived[ends.first].append(_Label((0, 0.0, 0.0), frozenset(), (), ends.before))
        for position in self._positions[:-1]:
            arrived = self._pruned(self._arrived[position], position)
            for record in self._usable:
                if record.first <= position < record.last:
                    self._enter(record, position, arrived)
        return min(self._arrived[ends.last], key=lambda label: label.key, default=None)

    def _enter(self, record: SpanRecord, position: int, arrived: Sequence[_Label]) -> None:
        """Continues the chains that reached ``position`` with this peer, to each position it can hand over at."""
        started = [self._started(label, record) for label in arrived if self._allowed(label, record.peer_id)]
        for label in _undominated(started, self._relevant(position)):
            for end in self._positions:
                if position < end <= record.last:
                    self._arrive(label, record.peer_id, position, end)

    def _allowed(self, label: _Label, peer_id: str) -> bool:
        return peer_id not in label.used and (label.peer_id, peer_id) not in self._request.banned_edges

    def _started(self, label: _Label, record: SpanRecord) -> _Label:
        peer_id = record.peer_id
        seconds = self._prices.network(label.peer_id, peer_id) + self._prices.waiting(peer_id)
        key = _plus(label.key, (int(self._foreign[peer_id]), seconds, self._prices.tie(peer_id)))
        return _Label(key, label.used | {peer_id}, label.hops, label.before)

    def _arrive(self, label: _Label, peer_id: str, position: int, end: int) -> None:
        seconds = self._prices.compute(peer_id, end - position)
        ends = self._request.ends
        if end == ends.last:
            if (peer_id, ends.after) in self._request.banned_edges:
                return
            seconds += self._prices.network(peer_id, ends.after)
        key = _plus(label.key, (0, seconds, 0.0))
        self._arrived[end].append(_Label(key, label.used, (*label.hops, (peer_id, position, end)), label.before))

    def _pruned(self, labels: Sequence[_Label], position: int) -> list[_Label]:
        """For each last peer the chains no other beats; of very many, the best."""
        by_peer: dict[str, list[_Label]] = {}
        for label in labels:
            by_peer.setdefault(label.peer_id, []).append(label)
        relevant = self._relevant(position)
        kept = [(rank, label) for group in by_peer.values() for rank, label in enumerate(_undominated(group, relevant))]
        kept.sort(key=lambda ranked: (ranked[0], ranked[1].key))
        return [label for _, label in kept[:_MAX_ARRIVED]]

    def _relevant(self, position: int) -> frozenset[str]:
        """Peers that can still run something: only these must not come twice."""
        return frozenset(record.peer_id for record in self._usable if record.last > position)


def _plus(a: _Key, b: _Key) -> _Key:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _undominated(labels: Iterable[_Label], relevant: frozenset[str]) -> list[_Label]:
    """Best first, without those that cost more and leave no more peers to use than a better one."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda label: label.key):
        if len(kept) == _MAX_LABELS:
            break
        used = label.used & relevant
        if not any(other.used & relevant <= used for other in kept):
            kept.append(label)
    return kept


# --- words --------------------------------------------------------------------------------------------------------


def _alternatives(best: Chain, usable: Sequence[SpanRecord], request: RouteRequest) -> Iterator[str]:
    seen = {best.hops}
    for hop in best.hops:
        rest = [record for record in usable if record.peer_id != hop.peer_id]
        other = _best(rest, request)
        if other is None:
            yield f"without {_name(hop.record)}: no chain"
        elif other.hops not in seen:
            seen.add(other.hops)
            yield f"lost: {other}  {_parts(other, usable, request)}: {_why_lost(best, other)}"


def _why_lost(best: Chain, other: Chain) -> str:
    if len(other.numerics_ids) > len(best.numerics_ids):
        return "its hops compute with different numerics"
    slower = (other.cost - best.cost) * 1000
    return f"{slower:.1f} ms slower" if slower > 0 else "computes with another numerics id than the session"


def _parts(chain: Chain, usable: Sequence[SpanRecord], request: RouteRequest) -> str:
    prices = _Prices(usable, request)
    compute = sum(prices.compute(hop.peer_id, hop.last - hop.first) for hop in chain.hops)
    waiting = sum(prices.waiting(hop.peer_id) for hop in chain.hops)
    stations = [request.ends.before, *(hop.peer_id for hop in chain.hops), request.ends.after]
    network = sum(prices.network(sender, receiver) for sender, receiver in pairwise(stations))
    return (
        f"{chain.cost * 1000:.1f} ms (compute {compute * 1000:.1f}, network {network * 1000:.1f}, "
        f"waiting {waiting * 1000:.1f})"
    )


def _name(record: SpanRecord) -> str:
    return record.public_name or record.peer_id[-8:]


def _layers(record: SpanRecord) -> str:
    return f"layers {record.first}:{record.last}"


def _no_route(usable: Sequence[SpanRecord], skipped: Sequence[Skipped], request: RouteRequest) -> SwarmError:
    missing = _uncovered((_span(record) for record in usable), request.ends)
    if not missing:
        return NoRoute(
            "every layer has a peer, but links between them failed a moment ago; try again shortly, or start another "
            f"node: {request.hint.command(request.ends.first, request.ends.last)}"
        )
    fits = _largest_context(usable, skipped, request)
    if fits is not None:
        return ContextExceeded(
            f"{request.context_tokens} tokens are needed and the peers' slots hold {fits}; shorten the prompt, lower "
            "--max-tokens, or start nodes with larger --slots"
        )
    named = " and ".join(f"{first}:{last}" for first, last in missing)
    commands = " and ".join(request.hint.command(first, last) for first, last in missing[:_MAX_COMMANDS])
    return NoRoute(f"{_cause(named, missing, skipped)}start one: {commands}", missing)


def _cause(named: str, missing: Sequence[Span], skipped: Sequence[Skipped]) -> str:
    """Why nobody serves the first missing range: the reason that passes soonest, when a record has one."""
    first, last = missing[0]
    near = {skip.kind for skip in skipped if skip.record.first < last and skip.record.last > first}
    if FULL in near:
        return f"every peer that serves layers {named} is full; try again later, or "
    if BANNED in near:
        return f"the peers that serve layers {named} failed a moment ago; try again shortly, or "
    if AWAY in near:
        return f"the peers that serve layers {named} are joining or leaving; try again shortly, or "
    others = sum(skip.kind == OTHER for skip in skipped)
    noted = f" ({others} peers serve another model or speak another version)" if others else ""
    return f"no peer serves layers {named}{noted}; "


def _largest_context(usable: Sequence[SpanRecord], skipped: Sequence[Skipped], request: RouteRequest) -> int | None:
    """The context for which there would be a chain, when slots are too small and nothing else is wrong."""
    sizes = [(_span(record), request.context_tokens) for record in usable]
    sizes += [(_span(skip.record), skip.slot_tokens) for skip in skipped if skip.kind == SMALL and skip.slot_tokens]
    best = [
        max((tokens for (first, last), tokens in sizes if first <= layer < last), default=0)
        for layer in range(request.ends.first, request.ends.last)
    ]
    return min(best) or None


def _span(record: SpanRecord) -> Span:
    return record.first, record.last


def _uncovered(spans: Iterable[Span], ends: Gap) -> tuple[Span, ...]:
    missing: list[Span] = []
    reached = ends.first
    for first, last in sorted((first, last) for first, last in spans if first < ends.last):
        if first > reached:
            missing.append((reached, first))
        reached = max(reached, last)
    if reached < ends.last:
        missing.append((reached, ends.last))
    return tuple(missing)

"""A node's numbers as Prometheus reads them, made from what it counts anyway when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dht.record import NodeState
from swarm.histogram import Histogram
from swarm.node.shared import Shared
from swarm.node.software import software
from swarm.node.tally import KINDS
from swarm.protocol import pb

PREFIX = "glm_swarm_"
CODES = tuple(code.lower() for code in pb.ErrorCode.keys() if code != "ERROR_CODE_UNSPECIFIED")  # noqa: SIM118


def registry_of(shared: Shared, peer_id: str) -> CollectorRegistry:
    """One for each node: several may run in one process."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(shared, peer_id))
    ProcessCollector(registry=registry)
    return registry


class NodeCollector(Collector):
    """To be asked in the node's event loop only."""

    def __init__(self, shared: Shared, peer_id: str) -> None:
        self._shared = shared
        self._peer_id = peer_id

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering asks for nothing

    def collect(self) -> Iterator[Metric]:
        yield from self._node()
        yield from self._work()
        yield from self._sessions()
        yield from self._journals()
        yield from self._failures()
        yield from self._streams()

    def _node(self) -> Iterator[Metric]:
        shared, info = self._shared, self._shared.host.info_or_none
        labels = {
            "peer_id": self._peer_id,
            "artifact": shared.manifest.artifact_id,
            "model": shared.manifest.name,
            "first_layer": str(shared.span[0]),
            "last_layer": str(shared.span[1] - 1),
            "numerics": "" if info is None else info.numerics_id,
            "software": software(),
        }
        node = GaugeMetricFamily(f"{PREFIX}node_info", "What the node serves, and as whom.", labels=tuple(labels))
        node.add_metric(tuple(labels.values()), 1)
        yield node
        states = {state.value: float(state == shared.state) for state in NodeState}
        yield _gauges("node_state", "1 for the state the node is in.", "state", states)

    def _work(self) -> Iterator[Metric]:
        shared, tally = self._shared, self._shared.tally
        yield _counters("tokens", "Tokens computed.", "kind", _with_zeros(tally.tokens, KINDS))
        yield _histogram("engine_call_rows", "Rows of an engine call.", tally.call_rows)
        yield _histogram("engine_call_sessions", "Sessions that shared an engine call.", tally.call_sessions)
        yield _histogram("engine_compute_seconds", "Time of a call inside the engine.", tally.compute)
        yield _histogram("engine_ipc_seconds", "Time of a call on the way to the engine and back.", tally.ipc)
        yield _histogram("step_queue_seconds", "Time that a step waited for the engine.", tally.queue)
        yield _serialising(tally.decoding, [meter.encoding for meter in tally.streams.values()])
        yield _gauge("queue_steps", "Steps that wait for the engine.", shared.runner.waiting)
        yield _gauge("engine_calls_in_flight", "Calls handed to the engine.", shared.runner.in_flight)
        yield _gauge("waiting_tokens", "Tokens of larger steps that are not computed yet.", shared.load.total)
        yield _counter("engine_restarts", "Engines that died and were replaced.", shared.host.restarts)

    def _sessions(self) -> Iterator[Metric]:
        table, tally = self._shared.table, self._shared.tally
        classes = table.slots.classes()
        held = Counter({slots.tokens: 0 for slots in classes})
        for session in table:
            held[session.slot_tokens] += session.position
        yield _gauge("sessions", "Open sessions.", len(table))
        understudies = sum(live.understudy is not None for live in self._shared.lives.values())
        yield _gauge("understudies", "Those of them that hold a copy for another node.", understudies)
        yield _gauge("state_copies", "Sessions whose state is being copied to understudies.", self._shared.copies)
        yield _gauge("client_peers", "Peers that have a session open.", len({session.owner for session in table}))
        yield _counter("sessions_opened", "Sessions opened.", tally.sessions)
        ended = _with_zeros(tally.unused, ("slot_needed", "too_long"))
        yield _counters("unused_sessions_ended", "Sessions ended because nobody used them.", "reason", ended)
        size = "slot_tokens"
        yield _gauges("kv_tokens", "Tokens held in slots of one size.", size, held)
        capacity = {slots.tokens: slots.tokens * slots.total for slots in classes}
        yield _gauges("kv_capacity_tokens", "Tokens that slots of one size can hold.", size, capacity)
        yield _gauges("slots", "Slots of one size.", size, {slots.tokens: slots.total for slots in classes})
        yield _gauges(
            "free_slots", "Slots that nobody has booked.", size, {slots.tokens: slots.free for slots in classes}
        )

    def _journals(self) -> Iterator[Metric]:
        journals = self._shared.journals
        kept = {"memory": journals.used_bytes, "file": journals.spilled_bytes}
        yield _gauges("journal_bytes", "What is kept to feed a successor again.", "where", kept)
        yield _gauge("journal_memory_limit_bytes", "What may be kept of it in memory.", journals.memory_bytes)

    def _failures(self) -> Iterator[Metric]:
        tally = self._shared.tally
        yield _counters("refusals", "Streams and requests refused.", "code", _with_zeros(tally.failures, CODES))
        yield _counters("failed_steps", "Steps that were not computed.", "code", _with_zeros(tally.failed_steps, CODES))
        late = {kind.removesuffix("_steps"): tally.failures[kind] for kind in ("stale_steps", "early_steps")}
        yield _counters("dropped_steps", "Steps of another epoch, which had no effect.", "kind", late)
        yield _counter("intruders", "Frames of peers who were not asked.", tally.failures["intruders"])

    def _streams(self) -> Iterator[Metric]:
        meters = {_kind(protocol): meter for protocol, meter in self._shared.tally.streams.items()}
        received = {kind: meter.received_bytes for kind, meter in meters.items()}
        sent = {kind: meter.sent_bytes for kind, meter in meters.items()}
        yield _counters("received_bytes", "Bytes of frames received.", "stream", received)
        yield _counters("sent_bytes", "Bytes of frames sent.", "stream", sent)


def _kind(protocol: str) -> str:
    return protocol.rpartition("/")[2]


def _with_zeros(counted: Counter[str], names: Iterable[str]) -> dict[str, int]:
    """A series that appears with its first failure hides that failure from a rate."""
    return {name: counted[name] for name in names}


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}{name}", text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float] | Mapping[int, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=(label,))
    for key, value in values.items():
        family.add_metric((str(key),), value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}{name}", text)
    family.add_metric((), _buckets(histogram), histogram.sum)
    return family


def _serialising(decoding: Histogram, encoding: Iterable[Histogram]) -> Metric:
    family = HistogramMetricFamily(
        f"{PREFIX}step_serialise_seconds", "Time to read or make the frames of a step.", labels=("direction",)
    )
    encoded = sum(encoding, Histogram(decoding.bounds))
    for direction, histogram in (("decode", decoding), ("encode", encoded)):
        family.add_metric((direction,), _buckets(histogram), histogram.sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return [("+Inf" if bound == inf else repr(bound), count) for bound, count in histogram.cumulative()]

"""What a node will load: layers and slots that fit the memory. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from dht.record import SpanRecord
from shim.types import ContextSpec
from swarm.artifact import Manifest, check_span, estimate, parse_layers
from swarm.artifact.memory import BREATHING_BYTES, SpanMemory, describe, format_bytes
from swarm.errors import NotEnoughMemory, StoreError, UsageError
from swarm.node.config import ModelOptions
from swarm.node.slots import bounded, default_slots
from swarm.placement.choice import Choice, Place, Span, choose_span

DEFAULT_CHUNK_TOKENS = 512
FLOAT_BYTES = 4
# Rows of one call whose logits may be wanted: the drafts of one session to verify, or a row of each of many sessions.
# Room for a whole chunk of GLM-5.2 would take 317 MB.
WANTED_ROWS_PER_CALL = 128

Contexts = tuple[ContextSpec, ...]


@dataclass(frozen=True)
class Plan:
    """Layers [first, last), the slots, and what they take of ``available_bytes``. ``choice`` is there for auto."""

    first: int
    last: int
    contexts: Contexts
    chunk_tokens: int
    memory: SpanMemory
    available_bytes: int
    choice: Choice | None = None

    @property
    def span(self) -> Span:
        return self.first, self.last

    @property
    def wanted_rows(self) -> int:
        return min(WANTED_ROWS_PER_CALL, self.chunk_tokens)

    def describe(self) -> str:
        """The sum, in one line."""
        slots = ", ".join(f"{spec.slots}x{spec.tokens}" for spec in self.contexts)
        return f"layers {self.first}:{self.last}, slots {slots}: {describe(self.memory, self.available_bytes)}"

    def check_fits(self) -> None:
        """Raises NotEnoughMemory."""
        needed = self.memory.total_bytes
        if needed > self.available_bytes:
            raise NotEnoughMemory(
                f"not enough memory: layers {self.first}:{self.last} need {format_bytes(needed)} and "
                f"{format_bytes(self.available_bytes)} may be used; name fewer layers, use "
                "--layers auto, or free memory"
            )


class Disk(Protocol):
    """What the machine's disk has of the model, and has room for."""

    def missing_bytes(self, first: int, last: int, *, mtp: bool = False) -> int: ...

    def room_bytes(self) -> int: ...


@dataclass(frozen=True)
class Planner:
    """Sums for one artifact under the operator's options. ``available_bytes`` is what the machine has free, and
    ``disk`` bounds what is chosen, where parts of the model are fetched."""

    manifest: Manifest
    options: ModelOptions
    available_bytes: int
    disk: Disk | None = None

    @property
    def budget_bytes(self) -> int:
        return self.available_bytes if self.options.memory_bytes is None else self.options.memory_bytes

    def explicit(self) -> Plan | None:
        """The span that ``--layers`` names, whether it fits or not; None for auto. Raises UsageError and SpanError."""
        candidates = list(self.candidates())
        span = parse_layers(self.options.layers)
        if span is None:
            return None
        check_span(self.manifest, *span)
        plans = [self._plan(*span, contexts) for contexts in candidates]
        return next((plan for plan in plans if plan.memory.total_bytes <= self.budget_bytes), plans[-1])

    def choose(self, records: Sequence[SpanRecord], peer_id: str, held: Sequence[Span] = ()) -> Plan:
        """The span that helps the swarm most. Raises NotEnoughMemory, and StoreError when the disk is too small."""
        *roomy, smallest = self.candidates()
        for contexts in roomy:
            try:
                return self._chosen(records, self.place(contexts, peer_id), contexts, held)
            except NotEnoughMemory:
                continue
        try:
            return self._chosen(records, self.place(smallest, peer_id), smallest, held)
        except NotEnoughMemory:
            if self.disk is None:
                raise
            in_memory = replace(self, disk=None).choose(records, peer_id)
            raise self._disk_too_small(in_memory, self.disk) from None

    def place(self, contexts: Contexts, peer_id: str) -> Place:
        """What the rules of moving have to know of this node."""

        def memory(first: int, last: int) -> int:
            return self._memory(first, last, contexts).total_bytes

        def cost(first: int, last: int) -> int:
            needed = memory(first, last)
            return needed if self._has_room(first, last) else max(needed, self.budget_bytes + 1)

        return Place(self.manifest.cuts, self.manifest.artifact_id, peer_id, self.budget_bytes, cost, memory)

    def carried_out(self, choice: Choice, contexts: Contexts) -> Plan:
        return self._plan(choice.first, choice.last, contexts, choice)

    def _chosen(self, records: Sequence[SpanRecord], place: Place, contexts: Contexts, held: Sequence[Span]) -> Plan:
        choice = choose_span(
            place.cuts,
            records,
            place.budget_bytes,
            place.cost,
            artifact_id=place.artifact_id,
            peer_id=place.peer_id,
            prefer=held,
        )
        return self.carried_out(choice, contexts)

    def _has_room(self, first: int, last: int) -> bool:
        if self.disk is None:
            return True
        return self.disk.missing_bytes(first, last, mtp=self._loads_mtp(last)) <= self.disk.room_bytes()

    def _loads_mtp(self, last: int) -> bool:
        return self.options.mtp and last == self.manifest.n_layers

    def _disk_too_small(self, plan: Plan, disk: Disk) -> StoreError:
        room_bytes = max(0, disk.room_bytes())
        missing, first, last = min(
            (disk.missing_bytes(first, last, mtp=self._loads_mtp(last)), first, last)
            for first, last in pairwise(self.manifest.cuts)
        )
        return StoreError(
            f"not enough room on the disk: the memory would hold layers {plan.first}:{plan.last}, but even layers "
            f"{first}:{last} need {format_bytes(missing - room_bytes)} more than the {format_bytes(room_bytes)} that "
            "may be taken; free some, lower --disk-reserve, or choose another --data-dir"
        )

    def candidates(self) -> Iterable[Contexts]:
        """Slots to try, most first."""
        trained = self.manifest.n_ctx_train
        if self.options.contexts is not None:
            return [bounded(self.options.contexts, trained)]
        return default_slots(trained)

    def _plan(self, first: int, last: int, contexts: Contexts, choice: Choice | None = None) -> Plan:
        self._check_mtp(first, last)
        memory = self._memory(first, last, contexts)
        return Plan(first, last, contexts, self._chunk_tokens(contexts), memory, self.budget_bytes, choice)

    def _memory(self, first: int, last: int, contexts: Contexts) -> SpanMemory:
        row_bytes = self.manifest.n_embd * FLOAT_BYTES if last < self.manifest.n_layers else 0
        most_bytes = sum(spec.slots * spec.tokens for spec in contexts) * row_bytes
        return estimate(
            self.manifest,
            first,
            last,
            contexts,
            chunk_tokens=self._chunk_tokens(contexts),
            wanted_rows=WANTED_ROWS_PER_CALL,
            kv_type=self.options.kv_type,
            journal_bytes=min(self.options.journal_bytes, most_bytes),
            mtp=self.options.mtp,
            # what the operator gives is for the model: the node itself and the rest of the machine are beside it
            own_bytes=None if self.options.memory_bytes is None else 0,
            reserve_bytes=BREATHING_BYTES if self.options.memory_bytes is None else 0,
        )

    def _check_mtp(self, first: int, last: int) -> None:
        n_layers = self.manifest.n_layers
        if not self.options.mtp:
            return
        if not self.manifest.n_mtp:
            raise UsageError(f"--mtp: {self.manifest.name} has no MTP block; leave --mtp out")
        if last != n_layers:
            raise UsageError(
                f"--mtp: drafts are made by the span that ends with layer {n_layers - 1}, not by {first}:{last}; name "
                f"it, for example --layers {self.manifest.cuts[-2]}:{n_layers}, or leave --mtp out"
            )

    def _chunk_tokens(self, contexts: Contexts) -> int:
        return min(self.options.chunk_tokens or DEFAULT_CHUNK_TOKENS, max(spec.tokens for spec in contexts))

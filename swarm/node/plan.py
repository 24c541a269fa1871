"""What a node will load: layers and slots that fit the memory. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dht.record import SpanRecord
from shim.types import ContextSpec
from swarm.artifact import Manifest, check_span, estimate, parse_layers
from swarm.artifact.memory import BREATHING_BYTES, SpanMemory, describe, format_bytes
from swarm.errors import NotEnoughMemory, UsageError
from swarm.node.config import ModelOptions
from swarm.node.slots import bounded, default_slots
from swarm.placement import Choice, choose_span

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


@dataclass(frozen=True)
class Planner:
    """Sums for one artifact under the operator's options. ``available_bytes`` is what the machine has free."""

    manifest: Manifest
    options: ModelOptions
    available_bytes: int

    @property
    def budget_bytes(self) -> int:
        return self.available_bytes if self.options.memory_bytes is None else self.options.memory_bytes

    def explicit(self) -> Plan | None:
        """The span that ``--layers`` names, whether it fits or not; None for auto. Raises UsageError and SpanError."""
        candidates = list(self._candidates())
        span = parse_layers(self.options.layers)
        if span is None:
            return None
        check_span(self.manifest, *span)
        plans = [self._plan(*span, contexts) for contexts in candidates]
        return next((plan for plan in plans if plan.memory.total_bytes <= self.budget_bytes), plans[-1])

    def choose(self, records: Sequence[SpanRecord], peer_id: str) -> Plan:
        """The span that helps the swarm most. Raises NotEnoughMemory."""
        *roomy, smallest = self._candidates()
        for contexts in roomy:
            try:
                return self._chosen(records, peer_id, contexts)
            except NotEnoughMemory:
                continue
        return self._chosen(records, peer_id, smallest)

    def _chosen(self, records: Sequence[SpanRecord], peer_id: str, contexts: Contexts) -> Plan:
        choice = choose_span(
            self.manifest.cuts,
            records,
            self.budget_bytes,
            lambda first, last: self._memory(first, last, contexts).total_bytes,
            artifact_id=self.manifest.artifact_id,
            peer_id=peer_id,
        )
        return self._plan(choice.first, choice.last, contexts, choice)

    def _candidates(self) -> Iterable[Contexts]:
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

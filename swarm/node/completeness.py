"""Whether the swarm serves every layer, for the operator: a line when that changes."""

from __future__ import annotations

from collections.abc import Sequence

from dht.record import NodeState, SpanRecord
from swarm.artifact import Manifest
from swarm.placement.choice import Span, coverage_of


class Completeness:
    """Says nothing as long as nothing changes. ``lacking`` is what was missing at the last look."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._lacking: tuple[Span, ...] | None = None

    def look(self, records: Sequence[SpanRecord]) -> str:
        """A line for the operator, or nothing."""
        before, self._lacking = self._lacking, lacking(self._manifest, records)
        if before is None or before == self._lacking:
            return ""
        if not self._lacking:
            return f"the swarm is complete: every layer of {self._manifest.name} is served"
        missing = spans_text(self._lacking)
        if not before:
            return f"the swarm is incomplete: nobody serves layers {missing} any more; start a node for them"
        return f"the swarm is still incomplete: nobody serves layers {missing}"


def lacking(manifest: Manifest, records: Sequence[SpanRecord]) -> tuple[Span, ...]:
    """Layers that no node has online."""
    online = [record for record in records if record.state is NodeState.ONLINE]
    return coverage_of(online, manifest.cuts, manifest.artifact_id).uncovered


def spans_text(spans: Sequence[Span]) -> str:
    return ", ".join(f"{first}:{last}" for first, last in spans)

"""Where a model may be cut into spans.

A dense model may be cut between any two layers. In glm-dsa a layer whose indexer is "shared" reuses the selection of
the last "full" layer before it, and that selection does not travel with the activations: a span starts at a full layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.errors import SpanError, UsageError

if TYPE_CHECKING:
    from swarm.artifact.manifest import Manifest

AUTO = "auto"
_LAYERS = re.compile(r"(\d{1,5})\s*([:-])\s*(\d{1,5})", re.ASCII)


def legal_cuts(n_layers: int, indexer_types: Sequence[bool] = ()) -> tuple[int, ...]:
    """Every position where a span may start or end, ascending, 0 and ``n_layers`` included."""
    if not indexer_types:
        return tuple(range(n_layers + 1))
    inner = (layer for layer in range(1, n_layers) if indexer_types[layer])
    return (0, *inner, n_layers)


def parse_layers(text: str, option: str = "--layers", other: str = AUTO) -> tuple[int, int] | None:
    """``"A:B"`` is the half-open range [A, B); ``"auto"`` is None. Only the form is checked here. Raises
    ``UsageError`` in the words of ``option``, which also takes ``other``."""
    if text.strip().lower() == AUTO:
        return None
    match = _LAYERS.fullmatch(text.strip())
    if match is None:
        wrong = f"{option} {text!r} is neither A:B nor {other}" if other else f"{option} {text!r} is not A:B"
        example = f"{option} 0:10 or {option} {other}" if other else f"{option} 0:10"
        raise UsageError(f"{wrong}; write for example {example}")
    first, last = int(match[1]), int(match[3])
    if match[2] == "-":  # people mean the last layer by B then
        with_it, without = f"{option} {first}:{last + 1}", f"{first}:{last}"
        raise UsageError(f"{option} {text!r}: is layer {last} meant? Write {with_it} with it, or {without} without")
    return first, last


def check_range(cuts: Sequence[int], first: int, last: int) -> None:
    """Raises ``SpanError`` unless [first, last) is not empty, in range, and starts and ends at legal cuts."""
    n_layers = cuts[-1]
    if first == last:
        raise SpanError(f"layers {first}:{last} are empty, the end is not included; name some, like 0:{cuts[1]}")
    if first > last:
        raise SpanError(f"layers {first}:{last} run backwards; write {last}:{first}")
    if first < 0 or last > n_layers:
        raise SpanError(f"layers {first}:{last} are out of range; the model has {n_layers}, choose within 0:{n_layers}")
    for position in (first, last):
        if position not in cuts:
            raise SpanError(_illegal(cuts, first, last, position))


def check_span(manifest: Manifest, first: int, last: int) -> None:
    """``check_range`` for the model's own cuts."""
    check_range(manifest.cuts, first, last)


def _illegal(cuts: Sequence[int], first: int, last: int, position: int) -> str:
    below = max(cut for cut in cuts if cut < position)
    above = min(cut for cut in cuts if cut > position)
    return (
        f"layers {first}:{last} can't be served: this model may not be cut at {position}, because the layers from "
        f"{below} to {above - 1} share one indexer; cut at {below} or {above} instead (legal: {_listed(cuts)})"
    )


def _listed(cuts: Sequence[int]) -> str:
    shown = cuts if len(cuts) <= 12 else (*cuts[:6], "...", *cuts[-3:])
    return ", ".join(str(cut) for cut in shown)

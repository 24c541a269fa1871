"""From steps of sessions to one engine call and back. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shim.types import Flags, Floats, Ints, RowSummary, StepBatch, StepResult, SummarySpec

A = TypeVar("A", np.int32, np.float32, np.uint8)


@dataclass(frozen=True)
class Rows:
    """The rows of one session in a call: positions ``start`` and on in ``slot``.

    ``tokens`` or ``hidden`` as in ``StepBatch``. ``want`` marks the rows to sum up by ``summary``; None on a run that
    does not end at the last layer.
    """

    run: tuple[int, int]
    slot: int
    start: int
    count: int
    tokens: Ints | None
    hidden: Floats | None
    want: Flags | None
    summary: SummarySpec
    tiled: bool


def assemble(parts: Sequence[Rows]) -> tuple[StepBatch, tuple[SummarySpec, ...]]:
    """One call out of parts that share a run range."""
    batch = StepBatch(
        run=parts[0].run,
        slot=np.repeat(np.array([part.slot for part in parts], np.int32), [part.count for part in parts]),
        position=np.concatenate([np.arange(part.start, part.start + part.count, dtype=np.int32) for part in parts]),
        tokens=_joined([part.tokens for part in parts if part.tokens is not None]),
        hidden=_joined([part.hidden for part in parts if part.hidden is not None]),
        want=_joined([part.want for part in parts if part.want is not None]),
        tiled=parts[0].tiled,
    )
    return batch, tuple(part.summary for part in parts for _ in range(wanted(part)))


def separate(result: StepResult, parts: Sequence[Rows]) -> Iterator[StepResult]:
    """What each part gets of the call's result."""
    row = summary = 0
    for part in parts:
        hidden = None if result.hidden is None else result.hidden[row : row + part.count]
        mine: Sequence[RowSummary] = result.summaries[summary : summary + wanted(part)]
        yield StepResult(hidden, mine, result.compute_seconds)
        row += part.count
        summary += wanted(part)


def wanted(part: Rows) -> int:
    return 0 if part.want is None else int(np.count_nonzero(part.want))


def want_flags(count: int, *, all_rows: bool, last_row: bool) -> Flags:
    flags = np.full(count, 1 if all_rows else 0, np.uint8)
    if last_row:
        flags[-1] = 1
    return flags


def _joined(arrays: list[npt.NDArray[A]]) -> npt.NDArray[A] | None:
    if len(arrays) < 2:
        return arrays[0] if arrays else None
    return np.concatenate(arrays)

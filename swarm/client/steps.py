"""Steps as a caller sees them: what is asked, what is answered, and what takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shim.types import RowSummary
from swarm.client.hop import HopPlace
from swarm.client.links import SessionTerms
from swarm.client.sampler import TOP_LOGITS
from swarm.client.trace import RecoveryTrace, StepTrace
from swarm.protocol import pb


@dataclass(frozen=True)
class WantedRow:
    """What the exit shall return of a step's last row: its top logits, those of ``ids``, and the weight of the rest."""

    temperature: float = 1.0
    ids: tuple[int, ...] = ()
    top: int = TOP_LOGITS


@dataclass(frozen=True)
class StepRequest:
    """``tokens`` from position ``start`` on. ``row`` None: the answer is only an acknowledgement."""

    start: int
    tokens: Sequence[int]
    kind: pb.StepKind.ValueType
    row: WantedRow | None = None


@dataclass(frozen=True)
class StepAnswer:
    """``row`` is there when the request asked for it."""

    row: RowSummary | None
    numerics_id: str
    trace: StepTrace


class StepSession(Protocol):
    """What an answer needs of a session; a bare chain has it, too."""

    terms: SessionTerms

    @property
    def places(self) -> tuple[HopPlace, ...]: ...

    @property
    def numerics_ids(self) -> tuple[str, ...]: ...

    @property
    def tokens(self) -> tuple[int, ...]:
        """What it has computed and can go on from."""
        ...

    @property
    def recoveries(self) -> Sequence[RecoveryTrace]: ...

    async def send(self, request: StepRequest) -> int: ...

    async def answer(self, number: int) -> StepAnswer: ...

    async def step(self, request: StepRequest) -> StepAnswer: ...

    async def fetch_row(self, position: int) -> npt.NDArray[np.float32]: ...

    async def close(self) -> None: ...

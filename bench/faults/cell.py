"""The cells of the fault matrix: which fault strikes which hop at which moment."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from bench.faults.fault import Fault
from bench.faults.moment import Moment

N_DRAWN = 10


class Place(enum.IntEnum):
    """A hop of a chain of three, by its index."""

    ENTRY = 0
    MIDDLE = 1
    EXIT = 2


@dataclass(frozen=True)
class Cell:
    fault: Fault
    place: Place
    moment: Moment

    def __str__(self) -> str:
        return "-".join(part.name.lower() for part in (self.fault, self.place, self.moment))

    @property
    def senseless(self) -> str:
        """Why the cell can't be run; empty for all others."""
        if self.fault is Fault.JOURNAL_DISK_FULL and self.place is Place.EXIT:
            return "the exit keeps no journal"
        return ""

    @property
    def interrupts(self) -> bool:
        """Whether the fault must cost the session a hop. A slow link is no loss. What a full disk costs is needed when
        the successor is lost, too, so the experiment sees to that."""
        return self.fault is not Fault.LINK_SLOW


CELLS = tuple(Cell(*parts) for parts in product(Fault, Place, Moment))  # in the order of the table
CORE = (
    Cell(Fault.KILL_NODE, Place.MIDDLE, Moment.MID_DECODE),
    Cell(Fault.KILL_ENGINE, Place.EXIT, Moment.FIRST_TOKEN),
    Cell(Fault.STOP_NODE, Place.ENTRY, Moment.MID_PREFILL),
    Cell(Fault.LINK_CUT, Place.MIDDLE, Moment.SESSION_OPEN),
    Cell(Fault.LINK_RESET, Place.EXIT, Moment.IN_RECOVERY),
    Cell(Fault.LINK_SLOW, Place.MIDDLE, Moment.MID_PREFILL),
    Cell(Fault.GARBAGE_FRAME, Place.ENTRY, Moment.IN_RECOVERY),
    Cell(Fault.JOURNAL_DISK_FULL, Place.MIDDLE, Moment.MID_DECODE),
    Cell(Fault.DHT_PARTITION, Place.MIDDLE, Moment.FIRST_TOKEN),
)


def drawn(commit: str, n_cells: int = N_DRAWN) -> tuple[Cell, ...]:
    """Cells outside the core that a commit chooses, always the same ones."""
    others = [cell for cell in CELLS if cell not in CORE and not cell.senseless]
    return tuple(random.Random(commit).sample(others, n_cells))


def named(names: Sequence[str]) -> tuple[Cell, ...]:
    """The cells whose names have one of ``names`` in them; every cell for none."""
    return tuple(cell for cell in CELLS if not names or any(name in str(cell) for name in names))

"""Any fault at any hop at any moment: the answers stay what they would have been, and nothing is left behind.

The core cells, and ten that the commit draws, run with ``make test``, all others with ``make test-slow``; one alone
with ``-k kill_node-middle-mid_decode``. As a table: ``python -m bench.fault_matrix``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.fault_matrix import table
from bench.faults.cell import CELLS, CORE, N_DRAWN, Cell, drawn
from bench.faults.fault import Fault
from bench.faults.stage import Stage, stage
from bench.faults.trial import CELL_SECONDS, Outcome, run_cell
from bench.record import this_commit

COMMIT = this_commit().removesuffix("+dirty")
CHOSEN = (*CORE, *drawn(COMMIT))
SPANS = [(0, 2), (2, 4), (4, 6)]


def _params() -> Iterator[object]:
    for cell in CELLS:
        marks = [pytest.mark.skip(reason=cell.senseless)] if cell.senseless else []
        marks += [] if cell in CHOSEN else [pytest.mark.slow]
        yield pytest.param(cell, id=str(cell), marks=marks)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def ready(llama_untied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with stage(llama_untied_path, SPANS, tmp_path_factory.mktemp("matrix")) as made:
        yield made


@pytest.mark.timeout(2 * CELL_SECONDS)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("cell", _params())
async def test_cell(cell: Cell, ready: Stage) -> None:
    await run_cell(cell, ready)


def test_the_core_has_every_fault_and_a_commit_draws_others() -> None:
    assert {cell.fault for cell in CORE} == set(Fault)
    assert len({*CHOSEN}) == len(CORE) + N_DRAWN
    assert drawn("a") == drawn("a") != drawn("b")
    assert not any(cell.senseless for cell in CHOSEN)


def test_the_table_has_every_cell() -> None:
    outcomes: dict[Cell, Outcome | str] = {CELLS[0]: Outcome((0.5, 0.25), (1, 2), 3.0), CELLS[1]: "wrong tokens"}
    lines = table(outcomes).splitlines()
    assert len(CELLS) == 135
    assert len(lines) == 2 + 27
    assert lines[2] == "| kill node | entry | 0.50 (2) | FAILED | not run | not run | not run |"
    assert sum(line.count("keeps no journal") for line in lines) == 5

"""One swarm for the tests of a module: three spans, each served twice."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.faults.cell import drawn
from bench.record import this_commit
from tests.failover.runs import Rig, rig
from tests.failover.yard import Yard, yard


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which cells of the fault matrix the commit has drawn, so that a failure can be repeated."""
    reports = itertools.chain.from_iterable(terminalreporter.stats.values())
    if any("test_matrix.py::test_cell" in getattr(report, "nodeid", "") for report in reports):
        commit = this_commit().removesuffix("+dirty")
        cells = " ".join(map(str, drawn(commit)))
        terminalreporter.write_line(f"fault matrix, drawn by commit {commit}: {cells}")


SPANS = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}


@pytest.fixture(scope="module")
def nodes(llama_untied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    spans = {f"{letter}{number}": span for number in (0, 1) for letter, span in SPANS.items()}
    with yard(llama_untied_path, tmp_path_factory.mktemp("yard"), spans) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(nodes: Yard, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with rig(nodes, tmp_path_factory.mktemp("client")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def swarm(started: Rig) -> AsyncIterator[Rig]:
    """Whole before the test and made whole after it, which fails when something is left of its sessions."""
    started.said.clear()
    yield started
    await started.whole_again()

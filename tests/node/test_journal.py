"""Rows kept for a successor: the same bits from memory and from disk, and every byte and file given back."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.node.journal import Journal, JournalStore
from swarm.protocol import Activations

WIDTH = 8
ROW_BYTES = 4 * WIDTH


def rows(count: int, seed: int = 0) -> Activations:
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)


def unnamed_files(folder: Path) -> int:
    """Open files of this process that lie in ``folder`` and have no name."""
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            links.append(str(file.readlink()))
    return sum(link.startswith(str(folder)) and link.endswith("(deleted)") for link in links)


def pushed(journal: Journal, first: int, most_rows: int = 100) -> Activations:
    return np.concatenate([push.rows for push in journal.pushes(first, most_rows)])


@pytest.mark.parametrize("memory_rows", [0, 5, 100])
def test_rows_come_back_as_they_were(tmp_path: Path, memory_rows: int) -> None:
    store = JournalStore(memory_rows * ROW_BYTES, tmp_path)
    journal = store.open()
    computed = rows(12)
    journal.record(0, computed[:8], chunk=True)
    for at in range(8, 12):
        journal.record(at, computed[at : at + 1], chunk=False)
    assert np.array_equal(pushed(journal, 0), computed)
    pushes = list(journal.pushes(9, 2))
    assert [(push.start, len(push.rows), push.chunk) for push in pushes] == [(9, 2, False), (11, 1, False)]
    assert np.array_equal(np.concatenate([push.rows for push in pushes]), computed[9:])
    assert store.used_bytes + store.spilled_bytes == computed.nbytes
    journal.close()
    assert (store.used_bytes, store.spilled_bytes, store.n_open) == (0, 0, 0)


def test_the_caller_may_reuse_its_array(tmp_path: Path) -> None:
    journal = JournalStore(1 << 20, tmp_path).open()
    mine = rows(3)
    before = mine.copy()
    journal.record(0, mine, chunk=False)
    mine[:] = 0
    assert np.array_equal(pushed(journal, 0), before)


def test_the_file_has_no_name_and_goes_with_the_session(tmp_path: Path) -> None:
    journal = JournalStore(0, tmp_path).open()
    assert unnamed_files(tmp_path) == 0, "none before it is needed"
    journal.record(0, rows(4), chunk=True)
    assert unnamed_files(tmp_path) == 1
    assert not list(tmp_path.iterdir())
    journal.close()
    journal.close()
    assert unnamed_files(tmp_path) == 0


def test_a_full_disk_begins_the_journal_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = JournalStore(4 * ROW_BYTES, tmp_path, disk_reserve_bytes=1 << 62)
    journal = store.open()
    journal.record(0, rows(4), chunk=True)
    assert journal.covers(0, 4)
    journal.record(4, rows(1), chunk=False)
    assert "No space left" in caplog.text
    assert not journal.covers(0, 5)
    assert journal.covers(5, 5), "nothing to push"
    assert (store.used_bytes, unnamed_files(tmp_path)) == (0, 0)
    journal.record(5, rows(2, seed=1), chunk=False)
    assert (journal.first, journal.covers(5, 7), journal.covers(4, 7)) == (5, True, False)
    assert np.array_equal(pushed(journal, 5), rows(2, seed=1))


def test_a_closed_journal_covers_and_records_nothing(tmp_path: Path) -> None:
    store = JournalStore(1 << 20, tmp_path)
    journal = store.open()
    for at in range(3):
        journal.record(at, rows(1), chunk=False)
    pushes = journal.pushes(0, 1)
    next(pushes)
    journal.close()
    assert list(pushes) == []
    journal.record(3, rows(1), chunk=False)
    assert not journal.covers(0, 3)
    assert store.used_bytes == 0


class Accounting(RuleBasedStateMachine):
    """Random recording and rewinding in two journals of one store."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.store = JournalStore(20 * ROW_BYTES, self.folder)
        self.journals = [self.store.open(), self.store.open()]
        self.expected = [np.zeros((0, WIDTH), np.float32) for _ in self.journals]
        self.seed = 0

    @rule(which=st.integers(0, 1), back=st.integers(0, 8), count=st.integers(1, 8), chunk=st.booleans())
    def records(self, which: int, back: int, count: int, chunk: bool) -> None:
        self.seed += 1
        start = max(0, len(self.expected[which]) - back)
        fresh = rows(count, self.seed)
        self.journals[which].record(start, fresh, chunk=chunk)
        self.expected[which] = np.concatenate([self.expected[which][:start], fresh])

    @precondition(lambda self: any(len(one) for one in self.expected))
    @rule(which=st.integers(0, 1), back=st.integers(0, 30))
    def rewinds(self, which: int, back: int) -> None:
        keep = max(0, len(self.expected[which]) - back)
        self.journals[which].truncate(keep)
        self.expected[which] = self.expected[which][:keep]

    @invariant()
    def a_successor_gets_the_latest_rows(self) -> None:
        for journal, expected in zip(self.journals, self.expected, strict=True):
            fed = np.zeros((0, WIDTH), np.float32)
            for push in journal.pushes(0, 5):
                fed = np.concatenate([fed[: push.start], push.rows])
            assert np.array_equal(fed[: len(expected)], expected)

    def teardown(self) -> None:
        for journal in self.journals:
            journal.close()
        assert (self.store.used_bytes, self.store.spilled_bytes, self.store.n_open) == (0, 0, 0)
        assert unnamed_files(self.folder) == 0


def test_books_balance(tmp_path: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    Accounting.folder = tmp_path
    run_state_machine_as_test(Accounting, settings=settings(max_examples=30, stateful_step_count=20, deadline=None))

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shim.types import EngineInfo
from swarm.artifact.memory import SpanMemory
from swarm.node.footprint import Footprint, ProcessMemory, beside_the_span, process_memory, together

MIB = 1 << 20
INFO = EngineInfo(
    arch="llama",
    n_layers=6,
    n_embd=128,
    n_vocab=300,
    n_ctx_train=4096,
    first=0,
    last=6,
    contexts=(),
    chunk_tokens=16,
    n_mtp=0,
    numerics_id="build/cpu/f16",
    weights_bytes=500 * MIB,
    kv_bytes=100 * MIB,
    compute_bytes=40 * MIB,
    output_bytes=0,
)


def test_private_pages_and_those_of_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a file, with spaces"
    path.write_bytes(os.urandom(8 * MIB))
    before = process_memory(os.getpid())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        block = np.ones(64 * MIB, np.uint8)
        assert sum(mapped[start] for start in range(0, 8 * MIB, mmap.PAGESIZE)) > 0
        after = process_memory(os.getpid())
    assert dict(after.files)[str(path)] == 8 * MIB
    grown = after.anonymous_bytes - before.anonymous_bytes
    assert block.nbytes <= grown < block.nbytes + 8 * MIB, "the file's pages are no private ones"


def test_pages_that_processes_share_count_once() -> None:
    node = ProcessMemory(100, (("/lib/c.so", 30), ("/lib/only.so", 5)))
    worker = ProcessMemory(50, (("/lib/c.so", 20), ("/models/m.gguf", 1000)))
    assert together([node, worker], frozenset({"/models/m.gguf"})) == 100 + 50 + 30 + 5


def test_a_process_that_is_gone_is_not_measured(tmp_path: Path) -> None:
    assert beside_the_span([1], INFO, frozenset(), proc=tmp_path) is None


def footprint(compute_bytes: int) -> Footprint:
    planned = SpanMemory(500 * MIB, 100 * MIB, compute_bytes, 0, journal_bytes=10 * MIB, reserve_bytes=999 * MIB)
    return Footprint(planned, INFO, own_planned_bytes=400 * MIB, own_bytes=400 * MIB)


def test_what_is_left_free_is_not_compared() -> None:
    exact = footprint(40 * MIB)
    assert exact.planned_bytes == exact.taken_bytes == 1050 * MIB
    assert exact.off == 0
    assert "compute 40.0 MiB -> 40.0 MiB" in str(exact)


@pytest.mark.parametrize(("compute_mib", "warns"), [(85, False), (100, True)])
def test_the_operator_is_warned_of_a_plan_that_is_far_off(
    compute_mib: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        footprint(compute_mib * MIB).log()
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.WARNING][: 1 + warns]
    low = replace(footprint(40 * MIB), own_bytes=480 * MIB)
    assert low.is_far_off and low.off < 0

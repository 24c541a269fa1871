"""Weights that are read in or locked: exactly the span's bytes, and never a hole."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from bench.page_cache import drop, resident_in, resident_pages
from swarm.artifact import load_manifest
from swarm.artifact.manifest import Manifest
from swarm.artifact.memory import SpanMemory
from swarm.errors import NotAModel, NotEnoughMemory
from swarm.node import weights as weights_module
from swarm.node.config import Weights
from swarm.node.node import SwarmNode
from swarm.node.reporter import Silent
from swarm.node.weights import PAGE, LockedWeights, Range, cache_warning, held_parts, read_in, span_ranges
from tests.node.harness import config

MIB = 1 << 20
SPAN = (2, 4)


@pytest.fixture(scope="module")
def manifest(llama_untied_path: Path) -> Manifest:
    return load_manifest(llama_untied_path)


def locked_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:"))


def test_the_ranges_are_the_spans_tensors(manifest: Manifest, llama_untied_path: Path) -> None:
    ranges = span_ranges(manifest, llama_untied_path.parent, *SPAN)
    inside = {(r.start <= t.offset and t.offset + t.bytes <= r.stop, t.name) for r in ranges for t in manifest.tensors}
    wanted = {tensor.name for tensor in manifest.span_tensors(*SPAN)}
    assert {name for held, name in inside if held} == wanted
    assert sum(r.size for r in ranges) >= manifest.span_bytes(*SPAN)
    assert {r.path for r in ranges} == {llama_untied_path}


def test_the_last_layers_draft_with_more(glm_random_ud_path: Path) -> None:
    manifest = load_manifest(glm_random_ud_path)
    plain, drafting = (span_ranges(manifest, glm_random_ud_path.parent, 6, 10, mtp=mtp) for mtp in (False, True))
    assert sum(r.size for r in drafting) - sum(r.size for r in plain) >= manifest.layer_bytes[10]


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    """8 MiB of data between holes, in a file of 64 MiB."""
    path = tmp_path / "partial"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
        file.seek(16 * MIB)
        file.write(os.urandom(8 * MIB))
        os.fsync(file.fileno())
    if path.stat().st_blocks * 512 >= 64 * MIB:
        pytest.skip("this file system makes no holes")
    return path


def test_holes_are_left_out(partial: Path) -> None:
    parts = held_parts([Range(partial, 10, 20 * MIB + 1), Range(partial, 20 * MIB + 1, 64 * MIB - 5)])
    assert parts == [Range(partial, 16 * MIB, 24 * MIB)]
    assert held_parts([Range(partial, 30 * MIB, 64 * MIB)]) == []


def test_a_page_that_two_ranges_share_counts_once(partial: Path) -> None:
    start = 16 * MIB
    parts = held_parts([Range(partial, start + 1, start + 10), Range(partial, start + 20, start + PAGE + 1)])
    assert parts == [Range(partial, start, start + 2 * PAGE)]


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotAModel, match="check the file"):
        held_parts([Range(tmp_path / "nothing", 0, 1)])


def test_reading_brings_the_parts_in_and_tells_how_far_it_is(partial: Path) -> None:
    drop([partial])
    if resident_pages(partial).any():
        pytest.skip("this file system keeps its files in memory")
    part = Range(partial, 18 * MIB, 20 * MIB)
    told: list[int] = []
    assert read_in([part], told.append) == 2 * MIB
    assert told[-1] == 2 * MIB
    assert resident_in(resident_pages(partial), part.start, part.stop) == 2 * MIB // PAGE
    assert resident_in(resident_pages(partial), 40 * MIB, 64 * MIB) == 0


def test_locked_are_exactly_the_parts(partial: Path) -> None:
    before = locked_bytes()
    weights = LockedWeights([Range(partial, 17 * MIB, 17 * MIB + 8 * PAGE), Range(partial, 20 * MIB, 20 * MIB + PAGE)])
    told: list[int] = []
    weights.lock(told.append)
    assert locked_bytes() - before == weights.size == 9 * PAGE
    assert told == [8 * PAGE, 9 * PAGE]
    drop([partial])
    assert resident_in(resident_pages(partial), 17 * MIB, 17 * MIB + 8 * PAGE) == 8
    weights.close()
    weights.close()
    assert locked_bytes() == before


def test_closing_while_pages_are_locked_touches_no_others(partial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "STRIDE_BYTES", MIB)
    before, told = locked_bytes(), []
    locked = LockedWeights(held_parts([Range(partial, 0, 64 * MIB)]))

    def close(done: int) -> None:
        told.append(done)
        closing = threading.Thread(target=locked.close)
        closing.start()
        closing.join()

    with pytest.raises(InterruptedError):
        locked.lock(close)
    assert told == [MIB]
    assert locked_bytes() == before


def test_stopping_leaves_nothing_locked(partial: Path) -> None:
    before = locked_bytes()

    def stop(_done: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        LockedWeights([Range(partial, 17 * MIB, 17 * MIB + PAGE)]).lock(stop)
    assert locked_bytes() == before


class Listening(Silent):
    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def progress(self, what: str, fraction: float, *, n_bytes: int = 0) -> None:
        self.told.append((what, fraction))


async def test_a_node_holds_its_weights_while_it_serves(
    manifest: Manifest, llama_untied_path: Path, tmp_path: Path
) -> None:
    before = locked_bytes()
    given = config(llama_untied_path, "2:4", tmp_path)
    async with SwarmNode(replace(given, model=replace(given.model, weights=Weights.LOCKED))):
        locked = locked_bytes() - before
        assert manifest.span_bytes(*SPAN) <= locked <= manifest.span_bytes(*SPAN) + 16 * PAGE
    assert locked_bytes() == before
    drop([llama_untied_path])
    reporter = Listening()
    async with SwarmNode(replace(given, model=replace(given.model, weights=Weights.PREFETCHED)), reporter):
        assert ("reading weights", 1.0) in reporter.told
        assert locked_bytes() == before


async def test_weights_that_do_not_fit_are_not_locked(
    llama_untied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.node.upkeep.available_memory", lambda: 1 << 20)
    given = config(llama_untied_path, "2:4", tmp_path)
    with pytest.raises(NotEnoughMemory, match="--weights locked: the page cache has room for 0 B of"):
        async with SwarmNode(replace(given, model=replace(given.model, weights=Weights.LOCKED))):
            pass


# without the right to lock anything, as volunteers run it
LIMITED = """
import ctypes, resource, struct, sys
from pathlib import Path
from swarm.errors import NotEnoughMemory
from swarm.node.weights import LockedWeights, Range

soft, hard = int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)
assert ctypes.CDLL(None, use_errno=True).capset(header, none) == 0
weights = LockedWeights([Range(Path(sys.argv[1]), 16 << 20, 17 << 20)])
try:
    weights.lock()
except NotEnoughMemory as error:
    print(error)
else:
    print("locked")
"""


@pytest.mark.parametrize(
    ("soft", "hard", "told"),
    [
        (
            64 << 10,
            64 << 10,
            "1.0 MiB are to be locked and this process may lock 64.0 KiB; raise it (ulimit -l unlimited",
        ),
        (64 << 10, 8 << 20, "locked"),
    ],
)
def test_a_limit_that_is_too_low_is_named_before_anything_is_read(
    partial: Path, soft: int, hard: int, told: str
) -> None:
    partial.parent.chmod(0o755)
    command = [sys.executable, "-c", LIMITED, str(partial), str(soft), str(hard)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert told in ended.stdout


def test_a_page_cache_that_is_too_small_is_told() -> None:
    memory = SpanMemory(40 << 30, 4 << 30, 1 << 30, 0, reserve_bytes=1 << 30)
    assert cache_warning(memory, 46 << 30) is None
    line = cache_warning(memory, 36 << 30)
    assert line is not None and "room for 30.0 GiB of the 40.0 GiB of weights" in line
    assert "room for 0 B" in (cache_warning(memory, 1 << 30) or "")

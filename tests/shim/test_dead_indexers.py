"""A layer that shares another's top-k may carry the tensors of an indexer. They are dead: neither their presence nor
what is on disk in their place changes a bit, and they are not read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.page_cache import drop, resident_bytes, resident_in, resident_pages
from shim.engine import Engine
from shim.errors import UnsupportedError
from shim.types import Floats
from swarm.artifact import load_manifest
from tests import models
from tests.shim.steps import chain_logits, config, prompt, token_rows

SPANS = ((0, 6), (6, 10))
N_PROMPT = 4 * models.GLM_TOP_K


def dead_ranges(path: Path) -> list[tuple[int, int]]:
    """First and last byte of each dead tensor."""
    tensors = (tensor for tensor in gguf.GGUFReader(path).tensors if models.is_dead(tensor.name))
    return [(int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes)) for tensor in tensors]


def with_holes(source: Path, path: Path) -> Path:
    """A copy in which nothing was ever written where the dead tensors lie."""
    data, at = source.read_bytes(), 0
    with path.open("wb") as file:
        for first, last in [*dead_ranges(source), (len(data), len(data))]:
            file.write(data[at:first])
            file.truncate(last)
            file.seek(last)
            at = last
    return path


def rows(path: Path) -> Floats:
    """Logits of a prompt beyond top-k, and of a token after it, through two spans."""
    with (
        Engine.open(config(path, *SPANS[0], tokens=512)) as entry,
        Engine.open(config(path, 6, None, tokens=512)) as end,
    ):
        tokens = prompt(N_PROMPT + 1, entry.info.n_vocab)
        chunk = token_rows((0, 6), tokens[:-1], tiled=True)
        decoded = token_rows((0, 6), tokens[-1:], N_PROMPT)
        logits = [chain_logits([entry, end], batch, [len(batch.slot) - 1]) for batch in (chunk, decoded)]
    return np.concatenate(logits)


@pytest.fixture(scope="module")
def with_dead(model_folder: Path) -> Path:
    return models.write_glm(model_folder / "glm-random-dead.gguf", models.ud_mix, dead_indexers=True)


@pytest.fixture(scope="module")
def expected(glm_random_ud_path: Path) -> Floats:
    """From the file that has no dead tensors."""
    return rows(glm_random_ud_path)


def test_dead_tensors_change_nothing(with_dead: Path, expected: Floats) -> None:
    assert len(dead_ranges(with_dead)) == 6 * 5
    np.testing.assert_array_equal(rows(with_dead), expected)


def test_dead_tensors_need_not_be_on_disk(tmp_path: Path, with_dead: Path, expected: Floats) -> None:
    holes = with_holes(with_dead, tmp_path / "holes.gguf")
    assert holes.stat().st_blocks * 512 < with_dead.stat().st_size - 4 * 1024 * 1024
    np.testing.assert_array_equal(rows(holes), expected)


@pytest.mark.parametrize("dead", [False, True], ids=["absent", "present"])
def test_a_file_without_the_schedule_key(tmp_path: Path, expected: Floats, dead: bool) -> None:
    """The target artifact has no such key: what is known of its kind holds."""
    path = models.write_glm(tmp_path / "no-key.gguf", models.ud_mix, schedule_key=False, dead_indexers=dead)
    assert load_manifest(path).indexer_types == models.GLM_FULL_LAYERS
    np.testing.assert_array_equal(rows(path), expected)
    with pytest.raises(UnsupportedError, match="top-k of a layer before it"):
        Engine.open(config(path, 3, None))


def test_without_key_and_with_a_short_context_every_layer_runs_its_own(tmp_path: Path, expected: Floats) -> None:
    path = models.write_glm(
        tmp_path / "short.gguf", models.ud_mix, schedule_key=False, dead_indexers=True, context=1 << 17
    )
    assert load_manifest(path).cuts == tuple(range(11))
    Engine.open(config(path, 3, None)).close()
    assert not np.array_equal(rows(path), expected)


@pytest.mark.parametrize("make", [lambda source, _: source, with_holes], ids=["data", "holes"])
def test_dead_tensors_are_not_read(tmp_path: Path, with_dead: Path, make: Callable[[Path, Path], Path]) -> None:
    path = make(with_dead, tmp_path / "holes.gguf")
    load_manifest(path)
    drop([path])
    if resident_bytes([path]):
        pytest.skip("this file system keeps all its pages in memory")
    tensors = gguf.GGUFReader(path).tensors
    experts = next(tensor for tensor in tensors if tensor.name == "blk.8.ffn_gate_exps.weight")
    drop([path])
    first, n_bytes = int(experts.data_offset), int(experts.n_bytes)
    with Engine.open(config(path, 6, None)):
        deadline = time.monotonic() + 60
        while not resident_in(pages := resident_pages(path), first, first + n_bytes) and time.monotonic() < deadline:
            time.sleep(0.01)  # it is read in the background
    assert resident_in(pages, first, first + n_bytes) > 0
    assert sum(resident_in(pages, *part) for part in dead_ranges(path)) == 0

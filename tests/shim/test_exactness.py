"""The promise on bits: a chain gives what the unsplit model gives; a decode row does not depend on its neighbours, on
threads or on how a replay groups it; a prefill chunk has its bits at its shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shim.engine import Engine
from shim.types import ContextSpec, Floats, StepBatch
from tests.models import GLM_CUTS, GLM_TOP_K
from tests.shim.steps import chain_logits, config, prompt, run_whole, token_rows

BEYOND = 1100  # more cells than every block size of the attention kernels
DECODED = 24


def logits_of_decode(engines: Sequence[Engine], n_vocab: int, chunk: int, decoded: int = 4) -> Floats:
    """One prefill chunk and some decode rows; every row's logits."""
    tokens = prompt(chunk + decoded, n_vocab)
    rows = [chain_logits(engines, token_rows((0, 0), tokens[:chunk], tiled=True), range(chunk))]
    for position in range(chunk, chunk + decoded):
        rows.append(chain_logits(engines, token_rows((0, 0), tokens[position : position + 1], position), [0]))
    return np.concatenate(rows)


def open_chain(stack: ExitStack, path: Path, cuts: Sequence[int]) -> list[Engine]:
    ends: list[int | None] = [*cuts, None]
    return [
        stack.enter_context(Engine.open(config(path, first, last, tokens=512)))
        for first, last in zip([0, *cuts], ends, strict=True)
    ]


@pytest.fixture(scope="module")
def smollm2_unsplit(smollm2_path: Path) -> Floats:
    with Engine.open(config(smollm2_path, tokens=512)) as engine:
        return logits_of_decode([engine], engine.info.n_vocab, 40)


@pytest.mark.parametrize("cuts", [(15,), (1,), (29,), (10, 20), (3, 4), (7, 8, 29)])
def test_chain_equals_unsplit_smollm2(smollm2_path: Path, smollm2_unsplit: Floats, cuts: tuple[int, ...]) -> None:
    with ExitStack() as stack:
        engines = open_chain(stack, smollm2_path, cuts)
        found = logits_of_decode(engines, engines[0].info.n_vocab, 40)
    np.testing.assert_array_equal(found, smollm2_unsplit)


@pytest.mark.slow
@pytest.mark.parametrize("cut", range(1, 30))
def test_chain_equals_unsplit_smollm2_at_every_cut(smollm2_path: Path, smollm2_unsplit: Floats, cut: int) -> None:
    with ExitStack() as stack:
        engines = open_chain(stack, smollm2_path, (cut,))
        found = logits_of_decode(engines, engines[0].info.n_vocab, 40)
    np.testing.assert_array_equal(found, smollm2_unsplit)


@pytest.mark.slow
def test_chain_of_single_layers_equals_unsplit_smollm2(smollm2_path: Path, smollm2_unsplit: Floats) -> None:
    with ExitStack() as stack:
        engines = open_chain(stack, smollm2_path, range(1, 30))
        found = logits_of_decode(engines, engines[0].info.n_vocab, 40)
    np.testing.assert_array_equal(found, smollm2_unsplit)


def test_chain_equals_unsplit_untied(llama_untied_path: Path) -> None:
    with ExitStack() as stack:
        whole = open_chain(stack, llama_untied_path, ())
        n_vocab = whole[0].info.n_vocab
        expected = logits_of_decode(whole, n_vocab, 40)
        for cut in range(1, whole[0].info.n_layers):
            found = logits_of_decode(open_chain(stack, llama_untied_path, (cut,)), n_vocab, 40)
            np.testing.assert_array_equal(found, expected, err_msg=f"cut at {cut}")


@pytest.fixture(params=["glm_random_f32_path", "glm_random_ud_path"])
def glm_path(request: pytest.FixtureRequest) -> Path:
    path = request.getfixturevalue(request.param)
    assert isinstance(path, Path)
    return path


def test_chain_equals_unsplit_glm(glm_path: Path) -> None:
    chunk = 2 * GLM_TOP_K + 5  # the indexer really chooses
    with ExitStack() as stack:
        whole = open_chain(stack, glm_path, ())
        n_vocab = whole[0].info.n_vocab
        expected = logits_of_decode(whole, n_vocab, chunk)
        for cuts in [*((cut,) for cut in GLM_CUTS), GLM_CUTS]:
            found = logits_of_decode(open_chain(stack, glm_path, cuts), n_vocab, chunk)
            np.testing.assert_array_equal(found, expected, err_msg=f"cuts {cuts}")


def test_run_range_inside_the_span(smollm2_path: Path, smollm2_unsplit: Floats) -> None:
    """Spans 0-18 and 10-30 overlap: the first runs all of it or stops early, the second may start late."""
    tokens = prompt(40, 49152)
    entry_config = config(smollm2_path, 0, 18, slots=2)
    with Engine.open(entry_config) as entry, Engine.open(config(smollm2_path, 10, None, slots=2)) as tail:
        for slot, cut in ((0, 18), (1, 10), (0, 12)):
            rows = token_rows((0, cut), tokens, slot=slot, tiled=True)
            hidden = entry.step(rows).hidden
            assert hidden is not None
            wanted = np.ones(40, np.uint8)
            found = tail.logits_step(
                StepBatch((cut, 30), rows.slot, rows.position, hidden=hidden, want=wanted, tiled=True)
            )
            np.testing.assert_array_equal(found, smollm2_unsplit[:40], err_msg=f"cut at {cut}")


class Decoding:
    """A slot filled with ``BEYOND`` tokens, and the logits of the rows decoded after it one by one on one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens = prompt(BEYOND + DECODED, 49152)
        with self.engine(threads=1, slots=1) as engine:
            run_whole(engine, self.tokens[:BEYOND])
            self.alone = self.decode(engine, group=1)

    def engine(self, *, threads: int, slots: int) -> Engine:
        base = config(self.path, threads=threads)
        return Engine.open(replace(base, contexts=(ContextSpec(slots, BEYOND + DECODED),)))

    def decode(self, engine: Engine, *, group: int, slot: int = 0) -> Floats:
        """Replays the decoded rows in calls of ``group``."""
        rows = []
        for start in range(BEYOND, BEYOND + DECODED, group):
            part = self.tokens[start : min(start + group, BEYOND + DECODED)]
            rows.append(engine.logits_step(token_rows((0, 30), part, start, slot=slot, want=range(len(part)))))
        return np.concatenate(rows)


@pytest.fixture(scope="module")
def decoding(smollm2_path: Path) -> Decoding:
    return Decoding(smollm2_path)


@pytest.fixture(scope="module", params=[1, 2], ids=["1-thread", "2-threads"])
def filled(request: pytest.FixtureRequest, decoding: Decoding) -> Iterator[Engine]:
    """16 slots: number 5 holds the long prompt, the others something of other lengths."""
    with decoding.engine(threads=request.param, slots=16) as engine:
        run_whole(engine, decoding.tokens[:BEYOND], slot=5)
        for slot in range(16):
            if slot != 5:
                run_whole(engine, prompt(1 + 19 * slot, 49152, seed=slot), slot=slot)
        yield engine


@pytest.mark.parametrize("group", [1, 2, 8, 9, DECODED])
def test_replay_in_any_grouping(filled: Engine, decoding: Decoding, group: int) -> None:
    np.testing.assert_array_equal(decoding.decode(filled, group=group, slot=5), decoding.alone)


def test_row_among_fifteen_others(filled: Engine, decoding: Decoding) -> None:
    lengths = [filled.position(slot) for slot in range(16)]
    order = [9, 5, *(slot for slot in range(16) if slot not in (5, 9))]
    for step in range(DECODED):
        positions = [BEYOND + step if slot == 5 else lengths[slot] + step for slot in order]
        tokens = [decoding.tokens[BEYOND + step] if slot == 5 else 100 + slot for slot in order]
        batch = StepBatch(
            (0, 30),
            slot=np.array(order, np.int32),
            position=np.array(positions, np.int32),
            tokens=np.array(tokens, np.int32),
            want=np.array([slot in (5, 9) for slot in order], np.uint8),
        )
        np.testing.assert_array_equal(filled.logits_step(batch)[1], decoding.alone[step])
    for slot in range(16):
        if slot != 5:
            filled.truncate(slot, lengths[slot])


def test_prefill_chunk_at_its_shape(filled: Engine, decoding: Decoding) -> None:
    """Chunks of the same shape give the same bits in another slot, beside others, whatever the threads."""
    with decoding.engine(threads=1, slots=1) as alone:
        expected = run_whole(alone, decoding.tokens[:700], chunk=512)
    np.testing.assert_array_equal(run_whole(filled, decoding.tokens[:700], slot=2, chunk=512), expected)

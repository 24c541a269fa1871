"""The choice from a partial row is the choice from the whole row, or no choice."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shim.types import RowSummary
from swarm.client.sampler import (
    GREEDY,
    MAX_SEED,
    KnownLogits,
    Sampler,
    SamplingParams,
    log_probability,
    uniform,
)
from swarm.errors import UsageError

Row = npt.NDArray[np.float32]

PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 5)),
    top_k=st.sampled_from([0, 1, 2, 40, 255, 256, 257, 300, 5000]),
    top_p=st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.5, 0.95, 0.999999]), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-6, 0.5)),
    repeat_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-1, 1)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-1, 3)),
    penalty_window=st.sampled_from([0, 1, 16, 4096]),
)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """From flat to peaked, with many ties when rounded."""
    n_vocab = draw(st.sampled_from([2, 200, 256, 257, 2000, 50_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = rng.normal(draw(st.sampled_from([-20, 0, 10])), draw(st.sampled_from([0.01, 1.0, 4.0])), n_vocab)
    return (np.round(row) if draw(st.booleans()) else row).astype(np.float32)


def summarise(row: Row, params: SamplingParams, asked: tuple[int, ...], top: int = 256) -> RowSummary:
    """What an exit would say."""
    order = np.lexsort((np.arange(len(row)), -row))
    rest = row[order[top:]].astype(np.float64) / params.wire_temperature
    highest = rest.max() if len(rest) else 0.0
    weight = highest + math.log(np.exp(rest - highest).sum()) if len(rest) else -math.inf
    best = order[:top]
    return RowSummary(best.astype(np.int32), row[best], weight, row[np.array(asked, dtype=np.int64)])


def plain_choice(row: Row, params: SamplingParams, history: list[int], seed: int, position: int) -> int:
    """The definition, on the whole row: penalties, temperature, top-k, top-p, min-p, one draw."""
    logits = row.astype(np.float64)
    window = history[-params.penalty_window :] if params.penalty_window else []
    if params.penalises:
        for token in set(window):
            logit = logits[token]
            logit = logit / params.repeat_penalty if logit > 0 else logit * params.repeat_penalty
            logits[token] = logit - window.count(token) * params.frequency_penalty - params.presence_penalty
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return order[0]
    scaled = logits[order] / params.wire_temperature
    scaled = scaled[: params.top_k or len(scaled)]
    weights = np.exp(scaled - scaled[0])
    cumulated = np.cumsum(weights)
    kept = len(scaled)
    if params.top_p < 1:
        kept = min(kept, int((cumulated < params.top_p * cumulated[-1]).sum()) + 1)
    if params.min_p > 0:
        kept = min(kept, int((scaled - scaled[0] >= math.log(params.min_p)).sum()))
    target = uniform(seed, position) * cumulated[kept - 1]
    return order[min(int((cumulated[:kept] <= target).sum()), kept - 1)]


@settings(max_examples=300, deadline=None)
@given(row=rows(), params=PARAMS, seed=st.integers(0, MAX_SEED), position=st.integers(0, 2**20), data=st.data())
def test_a_partial_row_gives_the_token_of_the_whole_row_or_asks_for_it(
    row: Row, params: SamplingParams, seed: int, position: int, data: st.DataObject
) -> None:
    history = data.draw(st.lists(st.integers(0, len(row) - 1), max_size=30))
    sampler = Sampler(params, seed)
    expected = plain_choice(row, params, history, seed, position)
    assert sampler.choose(KnownLogits.of_row(row), history, position) == expected

    asked = sampler.ids_to_ask(history)
    known = KnownLogits.of_summary(summarise(row, params, asked), asked, len(row))
    assert sampler.choose(known, history, position) in (expected, None)


@settings(max_examples=100, deadline=None)
@given(row=rows(), seed=st.integers(0, MAX_SEED), top_k=st.integers(1, 256), top_p=st.floats(0.1, 1))
def test_top_k_within_the_top_logits_never_needs_the_whole_row(row: Row, seed: int, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=1.3, top_k=top_k, top_p=top_p)
    known = KnownLogits.of_summary(summarise(row, params, ()), (), len(row))
    assert Sampler(params, seed).choose(known, [], 3) == plain_choice(row, params, [], seed, 3)


def test_usual_settings_on_a_peaked_row_rarely_need_the_whole_row() -> None:
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0.8, top_p=0.95)
    row = rng.normal(0, 3, 50_000).astype(np.float32)
    row[:5] += 15
    known = KnownLogits.of_summary(summarise(row, params, ()), (), len(row))
    choices = [Sampler(params, seed).choose(known, [], 0) for seed in range(300)]
    assert choices.count(None) == 0


def test_a_flat_row_needs_the_whole_row() -> None:
    row = np.zeros(2000, np.float32)
    params = SamplingParams(temperature=1.0)
    known = KnownLogits.of_summary(summarise(row, params, ()), (), len(row))
    seed = next(seed for seed in range(100) if uniform(seed, 0) > 0.5)
    assert Sampler(params, seed).choose(known, [], 0) is None
    assert Sampler(params, seed).choose(KnownLogits.of_row(row), [], 0) == int(uniform(seed, 0) * 2000)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    row = np.array([1, 5, 5, 0], np.float32)
    assert Sampler(GREEDY, 0).choose(KnownLogits.of_row(row), [], 0) == 1
    known = KnownLogits.of_summary(summarise(row, GREEDY, (), top=1), (), 4)
    assert Sampler(GREEDY, 0).choose(known, [], 0) == 1


def test_a_penalty_that_pushes_all_known_tokens_down_asks_for_the_row() -> None:
    row = np.array([5, 4.9, 4.8, 4.7], np.float32)
    params = SamplingParams(temperature=0, repeat_penalty=2)
    sampler = Sampler(params, 0)
    known = KnownLogits.of_summary(summarise(row, params, (0, 1), top=2), (0, 1), 4)
    assert sampler.choose(known, [0, 1], 2) is None
    assert sampler.choose(KnownLogits.of_row(row), [0, 1], 2) == 2


def test_an_error_of_the_exit_within_the_tolerance_changes_no_choice() -> None:
    rng = np.random.default_rng(7)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    for seed in range(200):
        row = rng.normal(0, 2, 3000).astype(np.float32)
        exact = summarise(row, params, ())
        blurred = RowSummary(exact.top_ids, exact.top_logits, exact.rest_log_sum_exp + 3e-6, exact.asked)
        choice = Sampler(params, seed).choose(KnownLogits.of_summary(blurred, (), len(row)), [], 0)
        assert choice in (None, plain_choice(row, params, [], seed, 0))


def test_the_draw_depends_on_seed_and_position_alone() -> None:
    draws = {(seed, position): uniform(seed, position) for seed in range(8) for position in range(64)}
    assert len(set(draws.values())) == len(draws)
    assert all(0 <= value < 1 for value in draws.values())
    assert uniform(3, 5) == draws[3, 5]
    assert uniform(MAX_SEED, 1 << 24) == uniform(MAX_SEED, 1 << 24)


def test_the_draw_is_pinned() -> None:
    """A resumed answer must draw as it did before, also after an update."""
    assert uniform(42, 7) == 0.4074136540795371


def test_log_probabilities_are_those_of_the_whole_row() -> None:
    rng = np.random.default_rng(0)
    row = rng.normal(0, 2, 1000).astype(np.float32)
    params = SamplingParams(temperature=0.7)
    scaled = row.astype(np.float64) / params.wire_temperature
    expected = scaled - np.log(np.exp(scaled).sum())
    summary = summarise(row, params, ())
    got = [log_probability(summary, float(row[token]), params.wire_temperature) for token in range(1000)]
    assert np.allclose(got, expected, atol=1e-9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": 1e-5},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repeat_penalty": 0},
        {"frequency_penalty": math.inf},
        {"penalty_window": 5000},
        {"seed": -1},
        {"seed": 1 << 64},
    ],
)
def test_a_wrong_parameter_is_named(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} is .*; give "):
        SamplingParams(**wrong)  # type: ignore[arg-type]

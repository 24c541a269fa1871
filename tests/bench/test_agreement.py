"""The agreement measurement at toy size: a random model, one short prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import agreement
from bench.agreement import ROUNDING, Agreement, Work


def test_measures_and_reports(glm_random_ud_path: Path) -> None:
    work = Work(str(glm_random_ud_path), 1, 80, (2,), ("f32/f32", "quantised/f16"), 1)
    record = agreement.measure(work)
    table = agreement.report(record, (ROUNDING, *work.variants))
    assert [line.split()[0] for line in table.splitlines()[1:]] == [ROUNDING, *work.variants]
    summary = record.summary
    assert summary["f32_f32_logit_difference_max"] < 1e-3 < summary["quantised_f16_logit_difference_max"]
    assert summary["f32_f32_kl_mean"] < 1e-6 < summary["quantised_f16_kl_mean"]
    assert all(len(samples) == work.tokens for samples in record.samples.values())


def test_figures_of_known_rows() -> None:
    """Two tokens: even odds against three to one in nats, and the other one on top."""
    found = Agreement()
    found.add(np.zeros((1, 2), np.float32), np.array([[0, np.log(3)]], np.float32))
    assert found.kl == [pytest.approx(0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75), rel=1e-6)]
    assert found.difference == [pytest.approx(np.log(3))]
    assert found.same_top == [0.0]
    found.add(np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32))
    assert found.summary["top1_agreement"] == 0.5
    assert found.summary["kl_mean"] == pytest.approx(found.kl[0] / 2)

"""The comparison of planned and taken memory, on a real load of a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.memory_plan import Case, Taken, cases, line, record_of, run_case
from swarm.errors import SwarmError


def test_a_real_load_takes_what_was_planned(llama_untied_path: Path) -> None:
    case = Case(llama_untied_path, 2, 6, "1x512,2x1024")
    taken = run_case(case, threads=1)
    assert taken.reported <= taken.reported_plan
    assert taken.weights_cached > 0
    assert abs(taken.off) < 0.1, line(case, taken)  # the libraries' share depends on their versions


def test_a_case_that_fails_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(SwarmError, match="ended with"):
        run_case(Case(tmp_path / "none.gguf", 0, 1, "1x512"), threads=1)


def test_spans_cover_the_model_and_the_block(glm_random_ud_path: Path) -> None:
    found = cases(glm_random_ud_path, ("1x512", "2x512"))
    assert {(case.first, case.last) for case in found} == {(0, 2), (2, 6), (6, 10), (0, 10)}
    assert [case.name for case in found if case.mtp] == ["glm-random-ud_6:10_2x512_mtp"]


def test_one_case_that_is_far_off_is_a_miss(llama_untied_path: Path) -> None:
    good = Taken(1000, 980, 500, 510, 400, 100, "build/cpu/f16")
    bad = Taken(1000, 900, 500, 510, 300, 100, "build/cpu/f16")
    first, second = (Case(llama_untied_path, 0, last, "1x512") for last in (3, 6))
    assert record_of({first: good}, "command", 1).verdict == "reached"
    record = record_of({first: good, second: bad}, "command", 1)
    assert record.verdict == "missed"
    assert record.summary["worst_off_percent"] == pytest.approx(100 / 9)

"""The span benchmark from end to end at toy size: figures for every point, and a record that holds them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from bench import glm_span
from bench.glm_slice import slice_name, toy_shape, write_slice
from bench.memory_bandwidth import read_bytes_per_second
from bench.record import Record
from bench.span_engine import Plan, Point, expected_seconds

TOY = "--batches 1,2 --chunks 16 --contexts 0,96 --hops 2 --hop-contexts 20 --hop-chunk 16 --tokens 3 --stream-mib 8"
QUICK = "--seconds-per-point 0.01 --threads 1"


def test_every_figure_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_slice(tmp_path, f"{slice_name(4)}-toy", toy_shape(4))
    written: list[Record] = []

    def write(record: Record) -> Path:
        written.append(record)
        return tmp_path

    monkeypatch.setattr(Record, "write", write)
    assert glm_span.main(["--slice", str(path), "--record", *shlex.split(f"{TOY} {QUICK}")]) == 0
    (record,) = written
    assert Record.model_validate_json(record.model_dump_json()) == record
    for context in (0, 96):
        for rows in (1, 2):
            assert record.summary[f"decode_{rows}_at_{context}_ms_per_layer"] > 0
            assert record.summary[f"decode_{rows}_at_{context}_memory_speed_share"] > 0
            assert len(record.samples[f"decode_{rows}_at_{context}_seconds"]) >= 3
        assert record.summary[f"prefill_16_at_{context}_tokens_per_second_per_layer"] > 0
    extra = (
        record.summary["decode_1_at_96_mb_per_token_and_layer"] - record.summary["decode_1_at_0_mb_per_token_and_layer"]
    )
    assert extra * 1e6 == pytest.approx(96 * 896)
    assert 0 < record.summary["hops_2_decode_ratio_at_20"] < 2
    assert len(record.samples["hops_2_decode_at_20_seconds"]) == 3
    assert record.samples["experts_1_rows"] == [4.0] * 4
    assert str(tmp_path) not in record.model_dump_json()
    assert shlex.split(record.command)[:3] == ["python", "-m", "bench.glm_span"]
    assert glm_span.parser().parse_args(shlex.split(record.command)[3:]).contexts == (0, 96)
    assert "chains on this machine" in capsys.readouterr().out


def test_points_beyond_the_budget_are_left_out() -> None:
    known = {Point(False, 1, 0): [0.5, 0.4], Point(True, 16, 0): [2.0]}
    assert expected_seconds(Point(False, 4, 8192), known) == pytest.approx(0.4 * 4 * 4)
    assert expected_seconds(Point(True, 128, 0), known) == pytest.approx(16)
    assert expected_seconds(Point(True, 16, 0), {}) == 0


def test_slots_hold_every_point() -> None:
    plan = Plan((1, 16), (16, 512), (0, 8192), 1.0, 60.0)
    assert (plan.slots.slots, plan.slots.tokens) == (16, 8192 + 512)
    assert [point.rows for point in plan.points(0)] == [1, 16, 16, 512]


def test_memory_speed() -> None:
    assert 1e8 < read_bytes_per_second(1, 8 << 20, 2) < 1e12


@pytest.mark.parametrize("text", ["0", "x", "", "1,-2"])
def test_bad_counts(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        glm_span.main(["--batches", text])
    assert "--batches" in capsys.readouterr().err

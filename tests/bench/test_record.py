"""Records in evidence/ keep to their form, and say what the form promises."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest
from pydantic import ValidationError

from bench.record import EVIDENCE, Record, percentile, this_commit, this_machine

RECORDS = sorted(EVIDENCE.glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_record_is_valid_and_its_command_exists(path: Path) -> None:
    record = Record.model_validate_json(path.read_text())
    assert record.id == path.stem
    assert all(record.samples.values())
    python, module_flag, module, *_ = shlex.split(record.command)
    assert (python, module_flag) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None


def test_there_is_evidence() -> None:
    assert RECORDS


def test_written_record_reads_back(tmp_path: Path) -> None:
    record = _record(id="something-measured")
    path = record.write(tmp_path)
    assert path == tmp_path / "something-measured.json"
    assert Record.model_validate_json(path.read_text()) == record
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("bad", [{"id": "../up"}, {"verdict": "fine"}, {"samples": {"a": ["x"]}}, {"more": 1}])
def test_other_forms_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        _record(**bad)


def test_percentiles_interpolate() -> None:
    samples = [float(i) for i in range(101)]
    assert percentile(samples, 0.5) == pytest.approx(50, abs=0.1)
    assert percentile(samples, 0.95) == pytest.approx(95, abs=0.1)
    assert percentile([7.0], 0.95) == 7.0


def _record(**changes: object) -> Record:
    values: dict[str, object] = {
        "id": "a-record",
        "claim": "Nothing.",
        "command": "python -m bench.hop_overhead",
        "commit": this_commit(),
        "artifact_id": "0" * 64,
        "engine_build": "none",
        "hardware": this_machine(),
        "settings": {"threads": 1},
        "samples": {"a_ms": [1.0, 2.0]},
        "summary": {"a_ms_p50": 1.5},
        "target": "none",
        "verdict": "no target",
    }
    return Record.model_validate(values | changes)

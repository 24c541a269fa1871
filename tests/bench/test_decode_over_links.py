"""What the benchmark over links makes of its samples."""

from __future__ import annotations

import argparse
import types
from pathlib import Path
from typing import cast

import pytest

from bench.decode_over_links import Measured, record_of, report
from swarm.artifact import Manifest

OPTIONS = argparse.Namespace(model=Path("m.gguf"), delays_ms=[0.0, 20.0], hops=3, tokens=3, rounds=1, threads=1)
MEASURED = Measured("build", {0.0: [0.02, 0.02, 0.5], 20.0: [0.104, 0.104, 0.9]})


def test_the_record_says_what_a_link_adds() -> None:
    record = record_of(OPTIONS, cast(Manifest, types.SimpleNamespace(artifact_id="a" * 64)), MEASURED)
    assert record.summary["added_per_link_ms"] == pytest.approx(21.0)
    assert record.summary["0_ms_tokens_per_second"] == pytest.approx(50.0)
    assert record.claim == "Over 3 hops, 20 ms one way cost a token 21.0 ms a link."


def test_the_table_takes_the_links_off() -> None:
    assert report(MEASURED, 4).splitlines()[2].split() == ["20", "9.62", "104.0", "24.0"]

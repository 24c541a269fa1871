"""What counts as an accepted draft, and a run at toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import mtp_acceptance
from bench.mtp_acceptance import Counts


def test_a_draft_behind_a_wrong_one_is_lost() -> None:
    counts = Counts()
    counts.add([10, 11, 12, 13, 14], [[11, 12], [12, 99], [98, 14], [14, 97], [96, 95]])
    # first drafts at four places, one wrong; second ones at three: right, wrong, lost
    assert (counts.asked, counts.accepted) == ([4, 3], [3, 1])
    assert counts.shares == [0.75]
    assert counts.share(1) == pytest.approx(1 / 3)


def test_nothing_was_drafted() -> None:
    counts = Counts()
    counts.add([10, 11], [[], []])
    assert (counts.asked, counts.share(0)) == ([0, 0], 0.0)


def test_a_random_model_is_measured_too(glm_random_ud_path: Path) -> None:
    counts, numerics_id = mtp_acceptance.count(glm_random_ud_path, ["abc", "hello there"])
    assert numerics_id.endswith("/f16")
    assert counts.asked[0] >= counts.asked[1] > 0
    assert len(counts.draft_ms) == len(counts.step_ms) == len(counts.shares) == 2


def test_a_trained_block_guesses_what_the_trunk_says(glm_tiny: Path) -> None:
    asked = list(mtp_acceptance.questions(glm_tiny, every=60))
    counts, _ = mtp_acceptance.count(glm_tiny, asked)
    assert len(asked) == len(counts.shares) >= 5
    assert counts.share(0) >= 0.9
    assert counts.share(1) >= 0.6


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mtp_acceptance.main(["--help"])
    assert "--record" in capsys.readouterr().out

"""Sizes on the command line, and what the user reads when one is wrong."""

from __future__ import annotations

import pytest

from swarm.artifact.sizes import parse_size
from swarm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("20GiB", 20 << 30), ("20G", 20 << 30), ("1.5gb", 3 << 29), ("512 MiB", 512 << 20), ("1000", 1000)],
)
def test_size(text: str, expected: int) -> None:
    assert parse_size(text, "--memory") == expected


@pytest.mark.parametrize("text", ["", "0", "many", "-3G", "20GG", "0.0001", "1e9", "٣G", "9" * 400])
def test_bad_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text, "--journal-memory", "256MiB")
    assert str(caught.value) == f"--journal-memory {text}: not a size; write for example --journal-memory 256MiB"


def test_nothing_is_a_size_where_that_makes_sense() -> None:
    assert parse_size("0", "--disk-reserve", zero=True) == 0

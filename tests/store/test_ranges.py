"""Answers to range requests, read without a server."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.store.bucket import TokenBucket
from swarm.store.pieces import Piece
from swarm.store.request import coalesce
from swarm.store.sources.ranges import Asked, headers_refusal, retry_after_seconds, strong_etag

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", None),
        ("120", 120.0),
        (" 0 ", 0.0),
        ("-5", None),
        ("1e9", None),
        ("soon", None),
        ("Sun, 01 Mar 2026 12:01:30 GMT", 90.0),
        ("Sun, 01 Mar 2026 11:00:00 GMT", 0.0),
        ("9" * 40, None),
        ("Sun, 01 Mar 2026 12:00:00 +99999999999999", None),
        ("Mon, 01 Jan 0001 00:00:00 +2359", 0.0),
    ],
)
def test_retry_after(text: str, seconds: float | None) -> None:
    assert retry_after_seconds({"Retry-After": text}, NOW) == seconds


def test_only_strong_etags_count() -> None:
    assert strong_etag({"ETag": '"a"'}) == '"a"'
    assert strong_etag({"ETag": 'W/"a"'}) is None
    assert strong_etag({}) is None


@given(
    st.dictionaries(
        st.sampled_from(["Content-Range", "Content-Length", "ETag", "Content-Encoding"]), st.text(max_size=30)
    )
)
def test_any_header_is_answered(headers: dict[str, str]) -> None:
    assert headers_refusal(headers, Asked(0, 10, 20, '"a"'))


def test_a_right_answer() -> None:
    headers = {"Content-Range": "bytes 0-9/20", "Content-Length": "10", "ETag": '"a"'}
    assert headers_refusal(headers, Asked(0, 10, 20, '"a"')) == ""
    assert headers_refusal(headers, Asked(0, 10, 20)) == ""
    assert "not say how long" in headers_refusal({"Content-Range": "bytes 0-9/*"}, Asked(0, 10, 20))


def pieces(lengths: list[tuple[int, int, int]]) -> list[Piece]:
    """From (file, gap before, length)."""
    result, ends = [], {0: 0, 1: 0}
    for index, (file, gap, length) in enumerate(sorted(lengths, key=lambda each: each[0])):
        start = ends[file] + gap
        ends[file] = start + length
        result.append(Piece(file, index, start, start + length, "t"))
    return result


@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 0, 7]), st.integers(1, 50)), max_size=40),
    st.integers(1, 200),
)
def test_requests_are_the_pieces_and_nothing_else(lengths: list[tuple[int, int, int]], max_bytes: int) -> None:
    given = pieces(lengths)
    requests = list(coalesce(given, max_bytes))
    assert [piece for request in requests for piece in request.pieces] == given
    for request in requests:
        assert request.bytes == sum(piece.bytes for piece in request.pieces)
        assert request.bytes <= max_bytes or len(request.pieces) == 1
    for before, after in itertools.pairwise(requests):
        parted = before.file != after.file or before.stop != after.start
        assert parted or after.pieces[0].stop - before.start > max_bytes


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=100), st.integers(100, 10_000))
def test_a_bucket_keeps_the_rate(sizes: list[int], rate: int) -> None:
    """By a clock that goes on only while it is waited, and then exactly as long."""
    bucket, now = TokenBucket(rate), 0.0
    for size in sizes:
        now += bucket.take(size, now)
    assert now == pytest.approx(sum(sizes) / rate)


def test_a_bucket_that_was_left_alone_saves_little() -> None:
    bucket = TokenBucket(1000)
    bucket.take(1, 0.0)
    assert bucket.take(250, 3600.0) == 0.0
    assert bucket.take(1000, 3600.0) == pytest.approx(1.0)

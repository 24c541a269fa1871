"""Bytes to text and stop strings, however the stream is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.stops import StopStrings
from swarm.client.utf8 import Utf8Stream
from swarm.errors import UsageError


@st.composite
def pieces(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> list[bytes]:
    data = draw(whole)
    places = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=8))})
    return [data[a:b] for a, b in pairwise(places)]


@given(pieces(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode))))
def test_streamed_bytes_decode_as_the_whole(parts: list[bytes]) -> None:
    stream = Utf8Stream()
    text = "".join([stream.feed(part) for part in parts] + [stream.flush()])
    assert text == b"".join(parts).decode("utf-8", "replace")


def test_an_unfinished_character_is_held_back() -> None:
    stream = Utf8Stream()
    assert [stream.feed(bytes([byte])) for byte in "a€".encode()] == ["a", "", "", "€"]
    assert stream.flush() == ""


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first stop string to be complete, of those the longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


LETTERS = st.text("ab<", max_size=24)


@given(text=LETTERS, stops=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4), data=st.data())
def test_stop_strings_cut_alike_however_the_text_comes(text: str, stops: list[str], data: st.DataObject) -> None:
    cutter, shown, met = StopStrings(stops), "", None
    rest = text
    while rest and met is None:
        size = data.draw(st.integers(1, len(rest)))
        fed = cutter.feed(rest[:size])
        rest, shown, met = rest[size:], shown + fed.text, fed.stop
    if met is None:
        shown += cutter.flush()
    assert (shown, met) == expected(text, stops)


@given(text=LETTERS, stops=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    cutter, shown = StopStrings(stops), ""
    for end, letter in enumerate(text, 1):
        fed = cutter.feed(letter)
        if fed.stop is not None:
            return
        shown += fed.text
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("stops", [[""], ["x" * 2000], ["x"] * 65])
def test_impossible_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(UsageError, match="; give "):
        StopStrings(stops)

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.artifact.cuts import check_range, legal_cuts, parse_layers
from swarm.errors import SpanError, UsageError

GLM_CUTS = (0, 1, 2, 6, 10, 14, 18)


def test_a_dense_model_is_cut_anywhere() -> None:
    assert legal_cuts(4) == (0, 1, 2, 3, 4)


def test_shared_layers_stay_with_their_indexer() -> None:
    assert legal_cuts(8, (True, True, True, False, False, False, True, False)) == (0, 1, 2, 6, 8)


@given(st.lists(st.booleans(), min_size=1, max_size=90))
def test_every_legal_window_starts_with_an_indexer_of_its_own(types: list[bool]) -> None:
    types[0] = True
    cuts = legal_cuts(len(types), types)
    assert cuts[0] == 0
    assert cuts[-1] == len(types)
    assert all(a < b for a, b in pairwise(cuts))
    assert {layer for layer in range(len(types)) if types[layer]} == set(cuts[:-1])


@pytest.mark.parametrize(("text", "span"), [("0:10", (0, 10)), (" 2 : 4 ", (2, 4)), ("AUTO", None)])
def test_layers_are_parsed(text: str, span: tuple[int, int] | None) -> None:
    assert parse_layers(text) == span


def test_a_dash_leaves_open_whether_the_last_layer_is_meant() -> None:
    with pytest.raises(UsageError, match=r"is layer 7 meant\? Write --layers 3:8 with it, or 3:7 without"):
        parse_layers("3-7")


@given(st.text())
def test_any_other_text_is_a_usage_error(text: str) -> None:
    try:
        span = parse_layers(text)
    except UsageError as error:
        assert "--layers auto" in str(error)
    else:
        assert span is None or len(span) == 2


@pytest.mark.parametrize("text", ["", "5", "1:2:3", "-1:4", "0..4", "a:b", "٣:٤", "0:99999999"])
def test_odd_layers_name_a_right_form(text: str) -> None:
    with pytest.raises(UsageError, match=r"write for example --layers 0:10"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (2, 2, "layers 2:2 are empty, the end is not included; name some, like 0:1"),
        (6, 2, "layers 6:2 run backwards; write 2:6"),
        (6, 20, "layers 6:20 are out of range; the model has 18, choose within 0:18"),
    ],
)
def test_a_bad_range_is_explained(first: int, last: int, message: str) -> None:
    with pytest.raises(SpanError) as caught:
        check_range(GLM_CUTS, first, last)
    assert str(caught.value) == message


@pytest.mark.parametrize(("first", "last", "position"), [(3, 10, 3), (2, 9, 9)])
def test_an_illegal_cut_names_the_legal_ones_around_it(first: int, last: int, position: int) -> None:
    below, above = (2, 6) if position == 3 else (6, 10)
    with pytest.raises(SpanError, match=rf"at {position}, .* cut at {below} or {above} instead .*legal: 0, 1, 2, 6"):
        check_range(GLM_CUTS, first, last)


@given(st.integers(0, 20), st.integers(0, 20))
def test_exactly_the_legal_windows_pass(first: int, last: int) -> None:
    legal = first < last and first in GLM_CUTS and last in GLM_CUTS
    if legal:
        check_range(GLM_CUTS, first, last)
    else:
        with pytest.raises(SpanError):
            check_range(GLM_CUTS, first, last)

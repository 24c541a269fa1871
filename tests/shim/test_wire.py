"""Messages between worker and parent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from shim import errors, messages, wire
from shim.types import RowSummary, StepBatch, StepResult, SummarySpec

KINDS: st.SearchStrategy[np.dtype[Any]] = st.sampled_from(
    [np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint8)]
)
ARRAYS = st.dictionaries(
    st.text(max_size=8), KINDS.flatmap(lambda kind: st_np.arrays(kind, st_np.array_shapes(min_side=0))), max_size=3
)


def parse(data: bytes, size: int) -> list[tuple[wire.Fields, wire.Arrays]]:
    parser = wire.Parser()
    return [message for start in range(0, len(data), size) for message in parser.feed(data[start : start + size])]


@given(arrays=st.lists(ARRAYS, max_size=3), size=st.integers(1, 200))
def test_messages_survive_any_cutting(arrays: list[wire.Arrays], size: int) -> None:
    data = b"".join(wire.encode({"n": n}, each) for n, each in enumerate(arrays))
    found = parse(data, size)
    assert [fields["n"] for fields, _ in found] == list(range(len(arrays)))
    for (_, actual), expected in zip(found, arrays, strict=True):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert actual[name].dtype == expected[name].dtype
            np.testing.assert_array_equal(actual[name], expected[name])
            assert actual[name].flags.aligned


@given(data=st.binary(min_size=wire.HEAD_BYTES, max_size=100))
def test_other_bytes_are_garbled(data: bytes) -> None:
    if data.startswith(b"SwE1"):
        return
    with pytest.raises(wire.GarbledMessage):
        parse(data, len(data))


@pytest.mark.parametrize("body", [b"[1]", b"{}", b"[{},[[1,2,3]]]", b'[{},[["a","<f4",[4]]]]', b"\xff", b"[[],[]]"])
def test_bad_bodies_are_garbled(body: bytes) -> None:
    with pytest.raises(wire.GarbledMessage):
        wire.decode(bytearray(body), np.empty(0, np.uint8))


def test_oversize_is_refused_before_memory_is_taken() -> None:
    head = bytearray(wire.encode({})[: wire.HEAD_BYTES])
    head[-1] = 0xFF
    with pytest.raises(wire.GarbledMessage):
        wire.new_body(head)


def test_step_round_trip() -> None:
    batch = StepBatch(
        (0, 4), np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.ones(2, np.int32), want=np.ones(2, np.uint8)
    )
    specs = [SummarySpec(0.5, 7, (1, 2)), SummarySpec()]
    [(fields, arrays)] = parse(messages.step_request(batch, specs), 1 << 20)
    found, found_specs = messages.read_step(fields, arrays)
    assert found_specs == specs
    assert (found.run, found.tiled, found.hidden) == ((0, 4), False, None)
    np.testing.assert_array_equal(found.position, batch.position)


def test_result_round_trip() -> None:
    summaries = [
        RowSummary(np.arange(n, dtype=np.int32), np.ones(n, np.float32), -np.inf, np.full(m, 2, np.float32))
        for n, m in ((3, 0), (0, 2), (1, 1))
    ]
    [(fields, arrays)] = parse(messages.step_reply(StepResult(summaries=summaries, compute_seconds=0.5)), 1 << 20)
    result = messages.read_step_reply(fields, arrays)
    assert result.compute_seconds == 0.5
    assert [(len(s.top_ids), len(s.asked)) for s in result.summaries] == [(3, 0), (0, 2), (1, 1)]
    assert result.summaries[0].rest_log_sum_exp == -np.inf


def test_errors_keep_their_class() -> None:
    for kind in (errors.BadStep, errors.StepGap, errors.SlotFull, errors.ModelError):
        [(fields, _)] = parse(messages.error_reply(kind("why")), 1 << 20)
        found = messages.read_error(fields)
        assert type(found) is kind
        assert str(found) == "why"
    assert type(messages.read_error({"error": "annotations", "text": ""})) is errors.EngineError

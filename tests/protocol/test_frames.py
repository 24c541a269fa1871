"""Frames, rules and activations as bytes."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Body,
    PartJoiner,
    StepAssembler,
    WireError,
    artifact_parts,
    decode,
    decode_activations,
    encode,
    encode_activations,
    limits,
    pb,
    row_parts,
    split_step,
)
from swarm.protocol.frames import timing_field
from tests.protocol.strategies import any_body, bodies, encodings, rows, simple_step, step_heads

SESSION = bytes(range(16))
PEER = "12D3KooWExample"
HEX = "ab" * 32


def frame(body: Body, version: int = PROTOCOL_VERSION) -> bytes:
    """The frame as protobuf itself writes it, without rules and length."""
    fields = pb.Frame.DESCRIPTOR.oneofs_by_name["body"].fields
    name = next(field.name for field in fields if field.message_type is body.DESCRIPTOR)
    return pb.Frame(version=version, **{name: body}).SerializeToString()  # type: ignore[arg-type]


def refusal(data: bytes) -> WireError:
    with pytest.raises(WireError) as caught:
        decode(data)
    return caught.value


def test_every_body_has_a_strategy() -> None:
    fields = pb.Frame.DESCRIPTOR.oneofs_by_name["body"].fields
    assert {kind.DESCRIPTOR for kind in bodies} == {field.message_type for field in fields}


@pytest.mark.parametrize("kind", bodies, ids=lambda kind: kind.DESCRIPTOR.name)
def test_round_trip(kind: type[Body]) -> None:
    @settings(max_examples=25, deadline=None)
    @given(bodies[kind])
    def check(body: Body) -> None:
        encoded = encode(body)
        assert int.from_bytes(encoded[:4], "big") == len(encoded) - 4
        assert decode(encoded[4:]) == body
        # protobuf reads the hand-written frame alike
        parsed = pb.Frame.FromString(encoded[4:])
        assert parsed == pb.Frame.FromString(frame(body))

    check()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_raise_wire_errors_only(data: bytes) -> None:
    try:
        decode(data)
    except WireError as error:
        assert error.code in (pb.MALFORMED, pb.TOO_LARGE, pb.VERSION_MISMATCH)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(range(1, 42)), st.binary(max_size=200))
def test_arbitrary_bodies_raise_wire_errors_only(field: int, data: bytes) -> None:
    tag = pb.Frame().SerializeToString() + bytes([8, 1])
    number = field << 3 | 2
    head = bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])
    size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 127 | 128, len(data) >> 7])
    try:
        decode(tag + head + size + data)
    except WireError as error:
        assert error.code in (pb.MALFORMED, pb.TOO_LARGE, pb.VERSION_MISMATCH)


@settings(max_examples=300, deadline=None)
@given(any_body, st.data())
def test_mutated_frames_raise_wire_errors_only(body: Body, data: st.DataObject) -> None:
    mutated = bytearray(encode(body)[4:])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated)))
        edit = data.draw(st.sampled_from(["set", "cut", "add"]))
        if edit == "add":
            mutated[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        elif edit == "cut":
            del mutated[at:]
        elif at < len(mutated):
            mutated[at] = data.draw(st.integers(0, 255))
    try:
        accepted = decode(bytes(mutated))
    except WireError:
        return
    # what decoding accepts, encoding accepts
    assert decode(encode(accepted)[4:]) == accepted


def test_unknown_fields_are_ignored() -> None:
    unknown = bytes([0xFA, 0x07, 3]) + b"new"  # field 127
    assert decode(frame(pb.Ping(nonce=7)) + unknown) == pb.Ping(nonce=7)


@pytest.mark.parametrize("version", [2, 99, 2**32 - 1])
def test_other_versions(version: int) -> None:
    error = refusal(frame(pb.Ping(nonce=7), version))
    assert (error.code, error.theirs, error.ours) == (pb.VERSION_MISMATCH, str(version), "1")


def test_other_version_that_cannot_be_parsed() -> None:
    error = refusal(bytes([8, 2]) + b"\xff\xff\xff")
    assert (error.code, error.theirs, error.ours) == (pb.VERSION_MISMATCH, "2", "1")


@pytest.mark.parametrize("data", [b"", bytes([8, 1]), b"\xff", frame(pb.Ping(), 0)])
def test_frames_without_version_or_body(data: bytes) -> None:
    assert refusal(data).code == pb.MALFORMED


def test_frames_have_a_limit() -> None:
    assert refusal(bytes(MAX_FRAME_BYTES + 1)).code == pb.TOO_LARGE
    with pytest.raises(WireError) as caught:
        encode(pb.StepPart(step=1, data=bytes(MAX_FRAME_BYTES)))
    assert caught.value.code == pb.TOO_LARGE


def opening(edit: Callable[[pb.Open], object]) -> pb.Open:
    message = pb.Open(
        session_id=SESSION,
        epoch=1,
        artifact_id=HEX,
        run=pb.Layers(first=0, last=4),
        context_tokens=64,
        chunk_tokens=16,
        encoding=pb.F32_LE,
        predecessor=pb.Neighbour(peer_id=PEER),
    )
    edit(message)
    return message


def stepping(edit: Callable[[pb.Step], object]) -> pb.Step:
    message = pb.Step(session_id=SESSION, epoch=1, step=1, start=3, n_tokens=2, kind=pb.DECODE)
    message.width, message.encoding, message.payload_bytes, message.payload = 2, pb.F32_LE, 16, bytes(16)
    edit(message)
    return message


def setting(name: str, value: object) -> Callable[[Body], None]:
    return lambda message: setattr(message, name, value)


def summary(**fields: object) -> pb.Answer:
    row = pb.RowSummary(**fields)  # type: ignore[arg-type]
    return pb.Answer(session_id=SESSION, epoch=1, step=1, rows=[row])


def asking(rows: int, **fields: object) -> pb.Step:
    message = simple_step(rows, tokens=True)
    message.output.CopyFrom(pb.OutputRequest(**fields))  # type: ignore[arg-type]
    return message


def many_addresses(message: pb.Open) -> None:
    message.predecessor.addresses.extend(["/ip4/10.0.0.1"] * 17)


MALFORMED: dict[str, Body] = {
    "short session id": opening(setting("session_id", bytes(15))),
    "long session id": pb.Close(session_id=bytes(17)),
    "no session id": pb.RowRequest(position=3),
    "epoch 0": pb.Attach(session_id=SESSION),
    "epoch 0 in an answer": pb.Attached(position=3),
    "artifact id in capitals": opening(setting("artifact_id", "AB" * 32)),
    "no artifact id": opening(setting("artifact_id", "")),
    "no run": opening(lambda message: message.ClearField("run")),
    "empty run": opening(lambda message: setattr(message.run, "first", 4)),
    "run turned round": opening(lambda message: setattr(message.run, "first", 5)),
    "layers beyond all models": opening(lambda message: setattr(message.run, "last", 4097)),
    "no context": opening(setting("context_tokens", 0)),
    "a context beyond all": opening(setting("context_tokens", limits.MAX_CONTEXT_TOKENS + 1)),
    "no chunk": opening(setting("chunk_tokens", 0)),
    "no encoding": opening(setting("encoding", 0)),
    "unknown encoding": opening(setting("encoding", 77)),
    "no predecessor": opening(lambda message: message.ClearField("predecessor")),
    "predecessor without a name": opening(lambda message: message.predecessor.ClearField("peer_id")),
    "peer id that is a path": opening(lambda message: setattr(message.predecessor, "peer_id", "../x")),
    "long peer id": pb.LinkFailed(session_id=SESSION, epoch=1, successor="a" * 129),
    "unknown state": pb.NodeDescription(state=9),  # type: ignore[arg-type]
    "infinite speed": pb.NodeDescription(state=pb.ONLINE, decode_tokens_per_second=math.inf),
    "clock is not a number": pb.NodeDescription(state=pb.ONLINE, clock=math.nan),
    "more free slots than slots": pb.NodeDescription(state=pb.ONLINE, slots=[pb.SlotClass(tokens=1, total=1, free=2)]),
    "unknown piece": pb.ArtifactRequest(artifact_id=HEX, piece=4),  # type: ignore[arg-type]
    "part beyond the end": pb.ArtifactPart(offset=5, total_bytes=8, data=b"four"),
    "empty part": pb.ArtifactPart(offset=5, total_bytes=8),
    "row of half a value": pb.Row(total_bytes=6, data=b"sixsix"),
    "step 0": stepping(setting("step", 0)),
    "no rows": stepping(setting("n_tokens", 0)),
    "no kind": stepping(setting("kind", 0)),
    "unknown kind": stepping(setting("kind", 3)),
    "positions beyond all": stepping(setting("start", limits.MAX_CONTEXT_TOKENS - 1)),
    "payload of another size": stepping(setting("payload_bytes", 20)),
    "rows do not fit the payload": stepping(setting("n_tokens", 3)),
    "payload beyond its size": stepping(setting("payload", bytes(17))),
    "payload without size": stepping(setting("payload_bytes", 0)),
    "width 0": stepping(setting("width", 0)),
    "width beyond all": stepping(setting("width", 65537)),
    "payload without encoding": stepping(setting("encoding", 0)),
    "neither payload nor tokens": pb.Step(session_id=SESSION, epoch=1, step=1, n_tokens=2, kind=pb.DECODE),
    "too few tokens": pb.Step(session_id=SESSION, epoch=1, step=1, n_tokens=2, kind=pb.DECODE, tokens=[1]),
    "token id beyond int32": pb.Step(session_id=SESSION, epoch=1, step=1, n_tokens=1, kind=pb.DECODE, tokens=[2**31]),
    "negative temperature": asking(1, temperature=-1.0),
    "temperature that makes the sum infinite": asking(1, temperature=1e-45),
    "temperature is not a number": asking(1, temperature=math.nan),
    "top 257": asking(1, top=257),
    "asked id beyond int32": asking(1, ids=[2**31]),
    "empty step part": pb.StepPart(step=1, offset=3),
    "ids without logits": summary(top_ids=[1]),
    "ids repeat": summary(top_ids=[1, 1], top_logits=[2.0, 1.0]),
    "logits ascend": summary(top_ids=[1, 2], top_logits=[1.0, 2.0]),
    "logit is not a number": summary(top_ids=[1], top_logits=[math.nan]),
    "logits cancel out": summary(top_ids=[1, 2], top_logits=[math.inf, -math.inf]),
    "asked logit is infinite": summary(asked_logits=[math.inf]),
    "rest is infinite": summary(rest_log_sum_exp=math.inf),
    "rest is not a number": summary(rest_log_sum_exp=math.nan),
    "negative retry": pb.Error(code=pb.NODE_FULL, retry_after_seconds=-1),
    "retry is not a number": pb.Error(code=pb.NODE_FULL, retry_after_seconds=math.nan),
    "short session id in an error": pb.Error(code=pb.GAP, session_id=b"x"),
}
TOO_LARGE: dict[str, Body] = {
    "text": opening(setting("purpose", "x" * 513)),
    "error text": pb.Error(code=pb.INTERNAL, message="x" * 513),
    "addresses": opening(many_addresses),
    "slot classes": pb.NodeDescription(state=pb.ONLINE, slots=[pb.SlotClass(tokens=1)] * 65),
    "artifact": pb.ArtifactPart(total_bytes=limits.MAX_ARTIFACT_PIECE_BYTES + 1, data=b"x"),
    "row": pb.Row(total_bytes=limits.MAX_ROW_BYTES + 4, data=b"x"),
    "hops": stepping(lambda message: message.timings.extend([pb.HopTiming()] * 257)),
    "tokens": stepping(lambda message: message.tokens.extend([1, 2, 3])),
    "asked ids": asking(1, ids=range(4097)),
    "rows in an answer": asking(600, all_rows=True, top=256),
    "answer rows": pb.Answer(session_id=SESSION, epoch=1, step=1, rows=[pb.RowSummary()] * 4097),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name: str) -> None:
    assert refusal(frame(MALFORMED[name])).code == pb.MALFORMED
    with pytest.raises(WireError):
        encode(MALFORMED[name])


@pytest.mark.parametrize("name", TOO_LARGE)
def test_too_large(name: str) -> None:
    assert refusal(frame(TOO_LARGE[name])).code == pb.TOO_LARGE


def test_the_examples_are_right_before_they_are_spoilt() -> None:
    for body in (opening(lambda _: None), stepping(lambda _: None), summary(top_ids=[2, 1], top_logits=[1.0, 1.0])):
        assert decode(frame(body)) == body


def test_the_largest_answer_that_may_be_asked_for_fits_a_frame() -> None:
    row = pb.RowSummary(
        position=2**24,
        top_ids=range(2**31 - 256, 2**31),
        top_logits=[1.0] * 256,
        rest_log_sum_exp=1.0,
        asked_logits=[1.0] * 100,
        drafts=[2**31 - 1] * 64,
    )
    n_rows = max(n for n in range(1, 600) if not refused(asking(n, all_rows=True, top=256, ids=range(100), drafts=64)))
    timing = pb.HopTiming(**dict.fromkeys((field.name for field in pb.HopTiming.DESCRIPTOR.fields), 2**32 - 1))
    timing.hop_index, timing.received_us, timing.sent_us = 255, 2**64 - 1, 2**64 - 1
    answer = pb.Answer(session_id=SESSION, epoch=2**32 - 1, step=2**64 - 1, rows=[row] * n_rows, timings=[timing] * 256)
    answer.numerics_id = "n" * 256
    assert n_rows > 200
    assert decode(encode(answer)[4:]) == answer


def refused(body: Body) -> bool:
    try:
        encode(body)
    except WireError:
        return True
    return False


def test_unknown_error_codes_and_encodings_pass() -> None:
    error = pb.Error(code=99, message="of a later release")  # type: ignore[arg-type]
    described = pb.NodeDescription(state=pb.ONLINE, encodings=[pb.F32_LE, 9])  # type: ignore[list-item]
    assert decode(frame(error)) == error
    assert decode(frame(described)) == described


# --- activations and steps


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), encodings, st.integers(0, 2**32))
def test_activations_round_trip(
    n_tokens: int, width: int, encoding: pb.ActivationEncoding.ValueType, seed: int
) -> None:
    sent = rows(n_tokens, width, seed)
    data = encode_activations(sent, encoding)
    assert np.array_equal(decode_activations(data, encoding, n_tokens, width), sent)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_f32_keeps_every_bit(values: list[float]) -> None:
    sent = np.array([values], dtype=np.float32)
    data = encode_activations(sent, pb.F32_LE)
    assert bytes(data) == sent.astype("<f4").tobytes()
    assert decode_activations(data, pb.F32_LE, 1, len(values)).tobytes() == sent.tobytes()


def test_rows_need_not_be_contiguous() -> None:
    sent = rows(6, 8, 1)[::2, ::2]
    data = encode_activations(sent, pb.F32_LE)
    assert np.array_equal(decode_activations(data, pb.F32_LE, 3, 4), sent)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("encoding", [pb.F32_LE, pb.F16_LE])
@pytest.mark.parametrize("at", [0, 69_999])
def test_values_that_are_not_finite(bad: float, encoding: pb.ActivationEncoding.ValueType, at: int) -> None:
    values = np.zeros((1, 70_000), dtype=np.float32)
    values[0, at] = bad
    data = values.astype("<f4" if encoding == pb.F32_LE else "<f2").tobytes()
    with pytest.raises(WireError) as received:
        decode_activations(data, encoding, 1, 70_000)
    with pytest.raises(WireError) as sent:
        encode_activations(values, encoding)
    assert (received.value.code, sent.value.code) == (pb.MALFORMED, pb.INTERNAL)


def test_values_beyond_f16() -> None:
    with pytest.raises(WireError, match="f32"):
        encode_activations(np.array([[70_000.0]], dtype=np.float32), pb.F16_LE)


def test_size_of_activations() -> None:
    with pytest.raises(WireError):
        decode_activations(bytes(12), pb.F32_LE, 1, 4)


def filled(step: pb.Step, width: int, encoding: pb.ActivationEncoding.ValueType = pb.F32_LE) -> pb.Step:
    step.width, step.encoding = width, encoding
    step.payload_bytes = step.n_tokens * width * (4 if encoding == pb.F32_LE else 2)
    return step


def cut_step(n_tokens: int, width: int) -> list[Body]:
    """The bodies that carry a step of zeros."""
    step = filled(simple_step(n_tokens), width)
    return [decode(data[4:]) for data in split_step(step, bytes(step.payload_bytes))]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 64), st.integers(1, 6144), encodings, st.integers(0, 2**32))
def test_steps_round_trip(
    data: st.DataObject, n_tokens: int, width: int, encoding: pb.ActivationEncoding.ValueType, seed: int
) -> None:
    step = filled(data.draw(step_heads(n_tokens, with_tokens=False)), width, encoding)
    sent = rows(n_tokens, width, seed)
    frames = list(split_step(step, encode_activations(sent, encoding)))
    assembler, whole = StepAssembler(1 << 24), None
    for encoded in frames:
        assert whole is None
        assert len(encoded) <= 4 + MAX_FRAME_BYTES
        body = decode(encoded[4:])
        whole = assembler.add(body) if isinstance(body, pb.StepPart) else assembler.begin(body)  # type: ignore[arg-type]
    assert whole is not None and whole[1] is not None
    assert whole[0] == step
    assert np.array_equal(whole[1], sent)
    assert not assembler.waiting


def test_steps_beyond_the_limit_are_not_allocated() -> None:
    step = filled(simple_step(65_536), 65_536)
    tracemalloc.start()
    with pytest.raises(WireError) as caught:
        StepAssembler(1 << 20).begin(step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.code == pb.TOO_LARGE
    assert peak < 1 << 20


SPOIL: dict[str, Callable[[pb.StepPart], None]] = {
    "another step": lambda part: setattr(part, "step", part.step + 1),
    "a hole": lambda part: setattr(part, "offset", part.offset + 1),
    "an overlap": lambda part: setattr(part, "offset", part.offset - 1),
    "far away": lambda part: setattr(part, "offset", 2**64 - 1),
    "too long": lambda part: setattr(part, "data", part.data * 4),
}


@pytest.mark.parametrize("how", SPOIL)
def test_parts_that_do_not_follow(how: str) -> None:
    step, first, *_ = cut_step(64, 2048)
    assert isinstance(step, pb.Step) and isinstance(first, pb.StepPart)
    assembler = StepAssembler(1 << 24)
    assert assembler.begin(step) is None
    SPOIL[how](first)
    with pytest.raises(WireError) as caught:
        assembler.add(first)
    assert caught.value.code == pb.MALFORMED


def test_part_without_a_step() -> None:
    with pytest.raises(WireError):
        StepAssembler(1 << 24).add(pb.StepPart(step=1, data=b"x"))


def test_a_step_goes_through_at_most_256_hops() -> None:
    step = simple_step(1, tokens=True)
    step.timings.extend([pb.HopTiming()] * 256)
    with pytest.raises(WireError) as caught:
        timing_field(step, pb.HopTiming(), 0)
    assert caught.value.code == pb.TOO_LARGE


# --- pieces


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 700_000), st.floats(0, 1))
def test_pieces_round_trip(n_bytes: int, fraction: float) -> None:
    piece = np.random.default_rng(n_bytes).bytes(n_bytes)
    offset = int(n_bytes * fraction)
    joiner = PartJoiner(n_bytes, offset)
    joined = [joiner.add(decode(encode(part)[4:])) for part in artifact_parts(piece, offset)]  # type: ignore[arg-type]
    assert joined[-1] == piece[offset:]
    assert set(joined[:-1]) <= {None}


def test_rows_round_trip() -> None:
    row = rows(1, 150_000, 3).tobytes()
    joiner = PartJoiner(limits.MAX_ROW_BYTES)
    assert [joined for part in row_parts(9, row) if (joined := joiner.add(part)) is not None] == [row]


def test_pieces_that_do_not_follow() -> None:
    first, second, third = artifact_parts(bytes(600_000))
    joiner = PartJoiner(1 << 20)
    joiner.add(first)
    with pytest.raises(WireError):
        joiner.add(third)
    second.total_bytes += 1
    with pytest.raises(WireError):
        joiner.add(second)
    with pytest.raises(WireError) as caught:
        PartJoiner(599_999).add(first)
    assert caught.value.code == pb.TOO_LARGE


def test_offset_beyond_the_piece() -> None:
    with pytest.raises(WireError):
        next(artifact_parts(b"four", 5))

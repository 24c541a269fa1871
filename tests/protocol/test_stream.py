"""Streams of frames over real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
import tracemalloc
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol import Body, FrameStream, ReceivedStep, StreamClosed, WireError, encode, pb, split_step
from swarm.protocol import stream as stream_module
from swarm.protocol.limits import MAX_UNSENT_BYTES
from tests.protocol.sockets import fragmenting_pair, stream_and_raw, stream_pair, tcp_pair, wait_until
from tests.protocol.strategies import any_body, encodings, rows, simple_step, step_heads

PREFILL_ROWS = rows(512, 6144, 5)


async def receive_step(stream: FrameStream) -> ReceivedStep:
    received = await stream.receive()
    assert isinstance(received, ReceivedStep)
    return received


def unsent_bytes(stream: FrameStream) -> int:
    return stream._writer.transport.get_write_buffer_size()


# --- round trips

messages = any_body.filter(lambda body: not isinstance(body, pb.Step | pb.StepPart))


@settings(max_examples=25, deadline=None)
@given(st.lists(messages, max_size=8), st.integers(0, 2**32))
def test_messages_survive_fragmentation(sent: list[Body], seed: int) -> None:
    async def run() -> None:
        async with fragmenting_pair(seed) as (left, right):
            for body in sent:
                await left.send(body)
            await left.close()
            received = []
            while (message := await right.receive()) is not None:
                received.append(message)
            assert received == sent

    asyncio.run(run())


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 200), st.integers(1, 6144), encodings, st.integers(0, 2**32))
def test_steps_survive_fragmentation(
    data: st.DataObject, n_tokens: int, width: int, encoding: pb.ActivationEncoding.ValueType, seed: int
) -> None:
    step = data.draw(step_heads(n_tokens, with_tokens=False))
    step.encoding = encoding
    sent = rows(n_tokens, width, seed)

    async def run() -> None:
        async with fragmenting_pair(seed) as (left, right):
            sending = asyncio.gather(left.send_step(step, sent), left.send(pb.Ping(nonce=1)))
            received = await receive_step(right)
            assert await right.receive() == pb.Ping(nonce=1)
            await sending
            assert received.activations is not None
            assert received.activations.dtype == np.float32
            assert np.array_equal(received.activations, sent)
            expected = pb.Step()
            expected.CopyFrom(step)
            expected.width, expected.payload_bytes = width, sent.size * (4 if encoding == pb.F32_LE else 2)
            assert received.step == expected

    asyncio.run(run())


async def test_steps_of_token_ids() -> None:
    step = simple_step(3, tokens=True)
    async with stream_pair() as (left, right):
        before_us = time.monotonic_ns() // 1000
        await left.send_step(step)
        received = await receive_step(right)
        assert received.step == step
        assert received.activations is None
        assert before_us <= received.received_us <= time.monotonic_ns() // 1000
        assert 0 < received.serialise_seconds < 1


async def test_encoding_is_f32_unless_said_otherwise() -> None:
    sent = np.array([[0.1, 1e-30]], dtype=np.float32)
    async with stream_pair() as (left, right):
        await left.send_step(simple_step(), sent)
        received = await receive_step(right)
    assert received.step.encoding == pb.F32_LE
    assert received.activations is not None
    assert received.activations.tobytes() == sent.tobytes()


async def test_array_may_be_reused_once_sent() -> None:
    array = rows(16, 6144, 1)
    sent = array.copy()
    async with stream_pair() as (left, right):
        await left.send_step(simple_step(16), array)
        array[:] = 0
        received = await receive_step(right)
    assert received.activations is not None
    assert np.array_equal(received.activations, sent)


@pytest.mark.parametrize("n_rows", [1, 512])
async def test_timing_of_this_hop_travels_with_a_step(n_rows: int) -> None:
    step = simple_step(n_rows)
    step.timings.add(hop_index=0)
    timing = pb.HopTiming(hop_index=1, compute_us=7, serialise_us=1000)
    before_us = time.monotonic_ns() // 1000
    async with stream_pair() as (left, right):
        sending = asyncio.create_task(left.send_step(step, PREFILL_ROWS[:n_rows], timing=timing))
        received = await receive_step(right)
        await sending
    assert [entry.hop_index for entry in received.step.timings] == [0, 1]
    stamped = received.step.timings[1]
    assert stamped.compute_us == 7
    assert stamped.serialise_us >= 1000
    assert before_us <= stamped.sent_us <= received.received_us
    assert (len(step.timings), timing.sent_us, step.width) == (1, 0, 0)


async def test_timing_of_the_exit_travels_with_its_answer() -> None:
    answer = pb.Answer(session_id=bytes(16), epoch=1, step=1, timings=[pb.HopTiming(hop_index=0)])
    async with stream_pair() as (left, right):
        await left.send(answer, timing=pb.HopTiming(hop_index=1))
        received = await right.receive()
    assert isinstance(received, pb.Answer)
    assert [timing.hop_index for timing in received.timings] == [0, 1]
    assert received.timings[1].sent_us > 0
    assert len(answer.timings) == 1


async def test_only_answers_and_steps_carry_timings() -> None:
    async with stream_pair() as (left, _):
        with pytest.raises(TypeError):
            await left.send(pb.Ping(), timing=pb.HopTiming())


async def test_arrays_that_do_not_fit_the_step() -> None:
    async with stream_pair() as (left, _):
        with pytest.raises(ValueError, match="shape"):
            await left.send_step(simple_step(2), rows(3, 4, 1))
        with pytest.raises(ValueError, match="array"):
            await left.send_step(pb.Step(payload=b"x"))


async def test_what_cannot_be_sent_leaves_the_stream_alone() -> None:
    broken = rows(2, 4, 1)
    broken[1, 3] = np.nan
    async with stream_pair() as (left, right):
        with pytest.raises(WireError):
            await left.send(pb.Close(session_id=b"short"))
        with pytest.raises(WireError):
            await left.send_step(simple_step(2), broken)
        with pytest.raises(WireError):
            await left.send_step(pb.Step(n_tokens=2), rows(2, 4, 1))
        await left.send(pb.Ping(nonce=3))
        assert await right.receive() == pb.Ping(nonce=3)


# --- hostile bytes


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=64) | any_body.map(encode), max_size=6).map(b"".join))
def test_arbitrary_bytes_raise_wire_errors_and_closed_only(data: bytes) -> None:
    async def run() -> None:
        async with stream_and_raw() as (stream, (_, writer)):
            writer.write(data)
            writer.write_eof()
            try:
                while await stream.receive() is not None:
                    pass
            except (WireError, StreamClosed):
                pass

    asyncio.run(run())


@pytest.mark.parametrize("length", [(1 << 20) + 1, 2**31, 2**32 - 1])
async def test_oversized_length_is_refused_without_its_body(length: int) -> None:
    async with stream_and_raw() as (stream, (_, writer)):
        tracemalloc.start()
        writer.write(struct.pack(">I", length))
        with pytest.raises(WireError) as caught:
            await stream.receive()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert caught.value.code == pb.TOO_LARGE
    assert peak < 1 << 19


async def test_step_beyond_the_limit_of_the_stream() -> None:
    async with stream_pair() as (left, right):
        right.max_step_bytes = 4 * 6144
        await left.send_step(simple_step(1), PREFILL_ROWS[:1])
        assert (await receive_step(right)).step.n_tokens == 1
        await left.send_step(simple_step(2), PREFILL_ROWS[:2])
        with pytest.raises(WireError) as caught:
            await right.receive()
    assert caught.value.code == pb.TOO_LARGE


async def test_values_that_are_not_finite_are_malformed() -> None:
    step = simple_step(1)
    step.encoding, step.width, step.payload_bytes = pb.F32_LE, 1, 4
    async with stream_and_raw() as (stream, (_, writer)):
        writer.writelines(split_step(step, struct.pack("<f", float("nan"))))
        with pytest.raises(WireError) as caught:
            await stream.receive()
    assert caught.value.code == pb.MALFORMED


@pytest.mark.parametrize("between", [pb.Ping(), pb.Error(code=pb.INTERNAL), simple_step(1, step=2, tokens=True)])
async def test_nothing_comes_between_the_parts_of_a_step(between: Body) -> None:
    step = simple_step(64)
    step.encoding, step.width, step.payload_bytes = pb.F32_LE, 2048, 64 * 2048 * 4
    first = next(split_step(step, bytes(step.payload_bytes)))
    async with stream_and_raw() as (stream, (_, writer)):
        writer.write(first + encode(between))
        with pytest.raises(WireError) as caught:
            await stream.receive()
    assert caught.value.code == pb.MALFORMED


async def test_a_stream_stays_refused() -> None:
    async with stream_and_raw() as (stream, (_, writer)):
        writer.write(struct.pack(">I", 2) + b"\xff\xff" + encode(pb.Ping()))
        for _ in range(2):
            with pytest.raises(WireError):
                await stream.receive()


# --- ends


async def test_end_between_frames_is_none() -> None:
    async with stream_and_raw() as (stream, (_, writer)):
        writer.write(encode(pb.Ping(nonce=1)))
        writer.write_eof()
        assert await stream.receive() == pb.Ping(nonce=1)
        assert await stream.receive() is None
        assert await stream.receive() is None


@pytest.mark.parametrize("kept", [1, 4, 9])
async def test_end_within_a_frame(kept: int) -> None:
    async with stream_and_raw() as (stream, (_, writer)):
        writer.write(encode(pb.Attach(session_id=bytes(16), epoch=1))[:kept])
        writer.write_eof()
        with pytest.raises(StreamClosed):
            await stream.receive()


async def test_end_within_a_step() -> None:
    step = simple_step(64)
    step.encoding, step.width, step.payload_bytes = pb.F32_LE, 2048, 64 * 2048 * 4
    async with stream_and_raw() as (stream, (_, writer)):
        writer.write(next(split_step(step, bytes(step.payload_bytes))))
        writer.write_eof()
        with pytest.raises(StreamClosed):
            await stream.receive()


async def test_reset_is_closed_for_both_directions() -> None:
    async with tcp_pair() as (stream, (_, writer)):
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        with pytest.raises(StreamClosed):
            await stream.receive()
        with pytest.raises(StreamClosed):
            await stream.send(pb.Ping())


async def test_sender_learns_that_the_reader_is_gone() -> None:
    async with stream_and_raw() as (stream, (_, writer)):
        sending = asyncio.create_task(stream.send_step(simple_step(512), PREFILL_ROWS))
        await wait_until(lambda: unsent_bytes(stream) > MAX_UNSENT_BYTES // 2)
        writer.transport.abort()
        with pytest.raises(StreamClosed):
            await sending
        assert stream.closed


async def test_close_can_be_repeated_and_ends_senders_and_the_receiver() -> None:
    async with stream_and_raw() as (stream, _):
        receiving = asyncio.create_task(stream.receive())
        sending = asyncio.create_task(stream.send_step(simple_step(512), PREFILL_ROWS))
        queued = asyncio.create_task(stream.send(pb.Ping()))
        await wait_until(lambda: unsent_bytes(stream) > MAX_UNSENT_BYTES // 2)
        await asyncio.gather(stream.close(), stream.close())
        await stream.close()
        assert await receiving is None
        with pytest.raises(StreamClosed):
            await sending
        with pytest.raises(StreamClosed):
            await queued
        with pytest.raises(StreamClosed):
            await stream.send(pb.Ping())
        assert await stream.receive() is None


async def test_close_flushes_what_the_reader_takes() -> None:
    async with stream_pair() as (left, right):
        await left.send_step(simple_step(32), PREFILL_ROWS[:32])
        closing = asyncio.create_task(left.close())
        received = await receive_step(right)
        await closing
        assert received.activations is not None
        assert np.array_equal(received.activations, PREFILL_ROWS[:32])
        assert await right.receive() is None


# --- refusing


async def test_refused_peer_reads_why_though_its_bytes_were_not_read() -> None:
    async with tcp_pair() as (stream, (reader, writer)):
        writer.write(struct.pack(">I", 2) + b"\xff\xff" + bytes(4_000_000))
        with pytest.raises(WireError) as caught:
            await stream.receive()
        peer = FrameStream(reader, writer)
        refusing = asyncio.create_task(stream.refuse(caught.value))
        received = await peer.receive()
        assert isinstance(received, pb.Error)
        assert received.code == pb.MALFORMED
        assert await peer.receive() is None
        await peer.close()
        await refusing


async def test_refusing_one_stream_leaves_the_others_alone() -> None:
    async with stream_pair() as (left, right), stream_and_raw() as (victim, (_, writer)):
        writer.write(bytes(10_000))
        with pytest.raises(WireError) as caught:
            await victim.receive()
        writer.transport.abort()
        await victim.refuse(caught.value)
        await left.send(pb.Ping(nonce=5))
        assert await right.receive() == pb.Ping(nonce=5)


async def test_refusing_while_another_task_receives() -> None:
    async with stream_pair() as (left, right):
        receiving = asyncio.create_task(left.receive())
        refusing = asyncio.create_task(left.refuse(pb.Error(code=pb.NODE_DRAINING, message="leaving")))
        received = await right.receive()
        assert isinstance(received, pb.Error)
        assert received.code == pb.NODE_DRAINING
        await right.close()
        await refusing
        assert await receiving is None


async def test_frames_that_come_after_a_refusal_are_dropped() -> None:
    async with stream_pair() as (left, right):
        receiving = asyncio.create_task(left.receive())
        refusing = asyncio.create_task(left.refuse(WireError(pb.NOT_ALLOWED, "no")))
        assert isinstance(await right.receive(), pb.Error)
        await right.send(pb.Ping())
        assert await receiving is None
        await right.close()
        await refusing


async def test_refusing_a_peer_that_does_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_CLOSE_SECONDS", 0.1)
    async with stream_and_raw() as (stream, _):
        sending = asyncio.create_task(stream.send_step(simple_step(512), PREFILL_ROWS))
        await wait_until(lambda: unsent_bytes(stream) > MAX_UNSENT_BYTES // 2)
        await stream.refuse(WireError(pb.INTERNAL, "stuck"))
        with pytest.raises(StreamClosed):
            await sending


# --- flow


async def test_reader_that_does_not_read_blocks_the_sender_at_one_mebibyte() -> None:
    async with stream_and_raw() as (stream, (reader, _)):
        largest = 0

        async def send_all() -> None:
            for number in range(1, 4):
                await stream.send_step(simple_step(512, step=number), PREFILL_ROWS)

        sending = asyncio.create_task(send_all())
        await wait_until(lambda: unsent_bytes(stream) > MAX_UNSENT_BYTES - (256 << 10))
        for _ in range(200):
            await asyncio.sleep(0)
            largest = max(largest, unsent_bytes(stream))
        assert not sending.done()
        assert 0 < largest <= MAX_UNSENT_BYTES
        n_bytes = 0
        while n_bytes < 3 * PREFILL_ROWS.nbytes:
            n_bytes += len(await reader.read(1 << 16))
            largest = max(largest, unsent_bytes(stream))
        await sending
        assert largest <= MAX_UNSENT_BYTES


async def test_concurrent_senders_do_not_mix_their_frames() -> None:
    sent = {number: rows(1 + number % 60, 6144, number) for number in range(1, 21)}

    async def send(left: FrameStream, number: int) -> None:
        await left.send(pb.Ping(nonce=number))
        await left.send_step(simple_step(len(sent[number]), step=number), sent[number])

    async with stream_pair() as (left, right):
        sending = asyncio.gather(*(send(left, number) for number in sent))
        pings: set[int] = set()
        steps: set[int] = set()
        while len(pings) + len(steps) < 2 * len(sent):
            received = await right.receive()
            if isinstance(received, pb.Ping):
                pings.add(received.nonce)
            else:
                assert isinstance(received, ReceivedStep)
                assert received.activations is not None
                assert np.array_equal(received.activations, sent[received.step.step])
                steps.add(received.step.step)
        await sending
    assert pings == steps == set(sent)


async def test_every_byte_of_a_slow_frame_counts_as_life() -> None:
    data = encode(pb.Attach(session_id=bytes(16), epoch=1))
    async with stream_and_raw() as (stream, (_, writer)):
        receiving = asyncio.create_task(stream.receive())
        for at in range(len(data)):
            before = stream.last_received
            assert not receiving.done()
            writer.write(data[at : at + 1])
            await wait_until(lambda before=before: stream.last_received > before)  # type: ignore[misc]
        assert await receiving == pb.Attach(session_id=bytes(16), epoch=1)
        assert stream.last_received <= time.monotonic()


# --- cancelling


async def test_cancelled_receive_loses_nothing() -> None:
    data = encode(pb.Attach(session_id=bytes(16), epoch=1))
    async with stream_and_raw() as (stream, (_, writer)):
        for half in (data[:7], data[7:15]):
            receiving = asyncio.create_task(stream.receive())
            before = stream.last_received
            writer.write(half)
            await wait_until(lambda before=before: stream.last_received > before)  # type: ignore[misc]
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
        writer.write(data[15:])
        assert await stream.receive() == pb.Attach(session_id=bytes(16), epoch=1)


async def test_cancelled_send_that_has_not_begun_sends_nothing() -> None:
    async with stream_pair() as (left, right):
        first = asyncio.create_task(left.send_step(simple_step(512), PREFILL_ROWS))
        queued = asyncio.create_task(left.send(pb.Ping(nonce=1)))
        await wait_until(lambda: unsent_bytes(left) > MAX_UNSENT_BYTES // 2)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert (await receive_step(right)).step.n_tokens == 512
        await first
        await left.send(pb.Ping(nonce=2))
        assert await right.receive() == pb.Ping(nonce=2)


async def test_cancelling_within_a_step_cuts_the_stream() -> None:
    async with stream_pair() as (left, right):
        sending = asyncio.create_task(left.send_step(simple_step(512), PREFILL_ROWS))
        await wait_until(lambda: unsent_bytes(left) > MAX_UNSENT_BYTES // 2)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert left.closed
        with pytest.raises(StreamClosed):
            await right.receive()
        with pytest.raises(StreamClosed):
            await left.send(pb.Ping())


@pytest.mark.parametrize("end", [FrameStream.close, lambda stream: stream.refuse(WireError(pb.INTERNAL, "x"))])
async def test_cancelled_close_still_closes(end: Callable[[FrameStream], Awaitable[None]]) -> None:
    async with stream_and_raw() as (stream, _):
        sending = asyncio.create_task(stream.send_step(simple_step(512), PREFILL_ROWS))
        await wait_until(lambda: unsent_bytes(stream) > MAX_UNSENT_BYTES // 2)
        closing = asyncio.ensure_future(end(stream))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(StreamClosed):
            await sending
        assert stream.closed


async def test_a_flood_of_small_frames_does_not_hold_up_the_rest() -> None:
    """All of them are there at once, and so are read without waiting for any."""
    n_pings = 1000
    async with stream_and_raw() as (stream, (_, writer)):
        writer.write(b"".join(encode(pb.Ping(nonce=nonce)) for nonce in range(n_pings)))
        await wait_until(lambda: len(stream._reader._buffer) > n_pings)  # type: ignore[attr-defined]
        passes = 0

        async def count() -> None:
            nonlocal passes
            while True:
                await asyncio.sleep(0)
                passes += 1

        counting = asyncio.create_task(count())
        assert [await stream.receive() for _ in range(n_pings)] == [pb.Ping(nonce=nonce) for nonce in range(n_pings)]
        assert passes > n_pings // 20
        counting.cancel()
        await asyncio.wait([counting])

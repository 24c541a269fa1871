"""Hypothesis strategies for every message of the wire, in range, and bytes that are not."""

from __future__ import annotations

import math
import string

import numpy as np
from hypothesis import strategies as st

from swarm.protocol import Body, limits, pb

session_ids = st.binary(min_size=16, max_size=16)
epochs = st.integers(1, 2**32 - 1)
steps = st.integers(1, 2**64 - 1)
positions = st.integers(0, limits.MAX_CONTEXT_TOKENS)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
token_ids = st.integers(0, limits.MAX_TOKEN_ID)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
hex_ids = st.text("0123456789abcdef", min_size=64, max_size=64)
peer_ids = st.text(string.ascii_letters + string.digits, min_size=1, max_size=60)
encodings = st.sampled_from([pb.F32_LE, pb.F16_LE])
f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
speeds = st.floats(0, 2.0**29, width=32)

layers = st.tuples(st.integers(0, 4095), st.integers(1, 4096)).map(
    lambda pair: pb.Layers(first=min(pair), last=max(pair) if min(pair) < max(pair) else max(pair) + 1)
)
layers = layers.filter(lambda span: span.last <= limits.MAX_LAYERS)
neighbours = st.builds(pb.Neighbour, peer_id=peer_ids, addresses=st.lists(texts, max_size=16))
maybe_neighbour = st.none() | neighbours
hop_timings = st.builds(
    pb.HopTiming, hop_index=st.integers(0, 255), received_us=u64, sent_us=u64, queue_us=u32, compute_us=u32
)
timings = st.lists(hop_timings, max_size=3)
slots = st.integers(0, 4096).flatmap(
    lambda total: st.builds(
        pb.SlotClass, tokens=st.integers(1, 1 << 24), total=st.just(total), free=st.integers(0, total)
    )
)
parts = st.binary(min_size=1, max_size=300)


@st.composite
def row_summaries(draw: st.DrawFn) -> pb.RowSummary:
    ids = draw(st.lists(token_ids, max_size=20, unique=True))
    logits = sorted(draw(st.lists(f32, min_size=len(ids), max_size=len(ids))), reverse=True)
    return pb.RowSummary(
        position=draw(positions),
        top_ids=ids,
        top_logits=logits,
        rest_log_sum_exp=draw(st.just(-math.inf) | st.floats(allow_nan=False, allow_infinity=False)),
        asked_logits=draw(st.lists(f32, max_size=5)),
        drafts=draw(st.lists(token_ids, max_size=5)),
    )


outputs = st.builds(
    pb.OutputRequest,
    last_row=st.booleans(),
    all_rows=st.booleans(),
    temperature=st.just(0.0) | st.floats(2**-16, 1e3, width=32),
    top=st.integers(0, 256),
    ids=st.lists(token_ids, max_size=20),
    drafts=st.integers(0, 64),
    report_hops=st.booleans(),
)


@st.composite
def step_heads(draw: st.DrawFn, n_tokens: int | None = None, with_tokens: bool = True) -> pb.Step:
    """A step without its payload."""
    n = draw(st.integers(1, 50)) if n_tokens is None else n_tokens
    return pb.Step(
        session_id=draw(session_ids),
        epoch=draw(epochs),
        step=draw(steps),
        start=draw(st.integers(0, limits.MAX_CONTEXT_TOKENS - n)),
        n_tokens=n,
        kind=draw(st.sampled_from([pb.PREFILL, pb.DECODE])),
        tokens=draw(st.lists(token_ids, min_size=n, max_size=n)) if with_tokens else (),
        output=draw(st.none() | outputs),
        timings=draw(timings),
        replay=draw(st.booleans()),
    )


@st.composite
def whole_steps(draw: st.DrawFn) -> pb.Step:
    """A step whose payload, when it has one, is all in its own frame."""
    if draw(st.booleans()):
        return draw(step_heads())
    step = draw(step_heads(draw(st.integers(1, 8)), with_tokens=False))
    step.encoding = draw(encodings)
    step.width = draw(st.integers(1, 8))
    step.payload_bytes = step.n_tokens * step.width * (4 if step.encoding == pb.F32_LE else 2)
    step.payload = bytes(step.payload_bytes)
    return step


@st.composite
def cut_pieces(draw: st.DrawFn) -> tuple[int, int, bytes]:
    """offset, total and data of one part, all multiples of 4."""
    data = draw(parts) * 4
    offset = 4 * draw(st.integers(0, 1000))
    return offset, offset + len(data) + 4 * draw(st.integers(0, 1000)), data


@st.composite
def kv_rows(draw: st.DrawFn) -> pb.KvRows:
    count = draw(st.integers(1, 8))
    row_bytes = draw(st.tuples(*(st.integers(0, 16) for _ in range(3))).filter(any))
    return pb.KvRows(
        layer=draw(st.integers(0, limits.MAX_LAYERS)),
        first=draw(st.integers(0, limits.MAX_CONTEXT_TOKENS - count)),
        count=count,
        key_bytes=row_bytes[0],
        value_bytes=row_bytes[1],
        indexer_bytes=row_bytes[2],
        data=draw(st.binary(min_size=count * sum(row_bytes), max_size=count * sum(row_bytes))),
    )


bodies: dict[type[Body], st.SearchStrategy[Body]] = {
    pb.DescribeRequest: st.builds(pb.DescribeRequest),
    pb.NodeDescription: st.builds(
        pb.NodeDescription,
        artifact_id=st.just("") | hex_ids,
        span=st.none() | layers,
        state=st.sampled_from([pb.JOINING, pb.ONLINE, pb.DRAINING]),
        numerics_id=texts,
        slots=st.lists(slots, max_size=3),
        chunk_tokens=st.integers(0, 1 << 16),
        software=texts,
        public_name=texts,
        queue=u32,
        decode_tokens_per_second=speeds,
        prefill_tokens_per_second=speeds,
        clock=st.floats(0, 4e9),
        has_mtp=st.booleans(),
        encodings=st.lists(encodings, max_size=3),
        journal_free_bytes=u64,
    ),
    pb.ArtifactRequest: st.builds(
        pb.ArtifactRequest,
        artifact_id=hex_ids,
        piece=st.sampled_from([pb.MANIFEST, pb.HEADER, pb.DIGESTS]),
        offset=st.integers(0, limits.MAX_ARTIFACT_PIECE_BYTES),
    ),
    pb.ArtifactPart: cut_pieces().map(lambda cut: pb.ArtifactPart(offset=cut[0], total_bytes=cut[1], data=cut[2])),
    pb.Open: st.builds(
        pb.Open,
        session_id=session_ids,
        epoch=epochs,
        artifact_id=hex_ids,
        run=layers,
        context_tokens=st.integers(1, limits.MAX_CONTEXT_TOKENS),
        chunk_tokens=st.integers(1, limits.MAX_STEP_TOKENS),
        encoding=encodings,
        predecessor=neighbours,
        successor=maybe_neighbour,
        numerics_id=texts,
        hop_index=st.integers(0, 255),
        keep_journal=st.booleans(),
        purpose=texts,
        successor_position=positions,
        understudy_of=maybe_neighbour,
        suspect=st.booleans(),
        fork_of=st.just(b"") | session_ids,
        fork_tokens=positions,
    ),
    pb.Opened: st.builds(
        pb.Opened, epoch=epochs, slot_tokens=positions, numerics_id=texts, position=positions, clock_us=u64
    ),
    pb.Reroute: st.builds(
        pb.Reroute,
        session_id=session_ids,
        epoch=epochs,
        predecessor=neighbours,
        successor=maybe_neighbour,
        successor_position=positions,
        push_journal=st.booleans(),
        hop_index=st.integers(0, 255),
        keep_tokens=positions,
        suspect=st.booleans(),
    ),
    pb.Rerouted: st.builds(pb.Rerouted, epoch=epochs, position=positions, journal_first=positions),
    pb.Close: st.builds(pb.Close, session_id=session_ids),
    pb.Closed: st.builds(pb.Closed),
    pb.Ping: st.builds(pb.Ping, nonce=u64),
    pb.Pong: st.builds(pb.Pong, nonce=u64, clock_us=u64, position=positions, queue=u32),
    pb.Answer: st.builds(
        pb.Answer,
        session_id=session_ids,
        epoch=epochs,
        step=steps,
        position=positions,
        rows=st.lists(row_summaries(), max_size=3),
        timings=timings,
        numerics_id=texts,
    ),
    pb.RowRequest: st.builds(pb.RowRequest, session_id=session_ids, position=positions),
    pb.Row: st.tuples(positions, cut_pieces()).map(
        lambda row: pb.Row(position=row[0], offset_bytes=row[1][0], total_bytes=row[1][1], data=row[1][2])
    ),
    pb.LinkFailed: st.builds(pb.LinkFailed, session_id=session_ids, epoch=epochs, successor=peer_ids, cause=texts),
    pb.StepDone: st.builds(pb.StepDone, session_id=session_ids, epoch=epochs, step=steps, position=positions),
    pb.Draining: st.builds(pb.Draining, session_id=session_ids, seconds=st.floats(0, limits.MAX_SECONDS)),
    pb.CopyState: st.builds(
        pb.CopyState, session_id=session_ids, understudy=neighbours, run=layers, upto_tokens=positions, order=u32
    ),
    pb.Copied: st.builds(
        pb.Copied,
        session_id=session_ids,
        understudy=peer_ids,
        position=positions,
        journal_first=positions,
        done=st.booleans(),
        failure=texts,
    ),
    pb.Attach: st.builds(pb.Attach, session_id=session_ids, epoch=epochs),
    pb.Attached: st.builds(pb.Attached, epoch=epochs, position=positions),
    pb.Step: whole_steps(),
    pb.StepPart: st.builds(pb.StepPart, step=steps, offset=u64, data=parts),
    pb.StateOffer: st.builds(pb.StateOffer, session_id=session_ids, artifact_id=hex_ids, numerics_id=texts, run=layers),
    pb.StateAccepted: st.builds(pb.StateAccepted, position=positions),
    pb.KvRows: kv_rows(),
    pb.StateHeld: st.builds(pb.StateHeld, position=positions, journal_first=positions),
    pb.Error: st.builds(
        pb.Error,
        code=st.integers(0, 60),
        message=texts,
        retry_after_seconds=st.floats(0, limits.MAX_SECONDS),
        session_id=st.just(b"") | session_ids,
        step=u64,
        position=positions,
        theirs=texts,
        ours=texts,
    ),
}
any_body: st.SearchStrategy[Body] = st.one_of(*bodies.values())


def rows(n_tokens: int, width: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Activations that f16 holds exactly."""
    values = np.random.default_rng(seed).integers(-2048, 2048, (n_tokens, width))
    return values.astype(np.float32) / np.float32(64)


def simple_step(n_tokens: int = 1, *, step: int = 1, tokens: bool = False) -> pb.Step:
    ids = range(n_tokens) if tokens else ()
    return pb.Step(session_id=bytes(16), epoch=1, step=step, n_tokens=n_tokens, kind=pb.DECODE, tokens=ids)

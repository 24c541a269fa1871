"""Peers that feed an understudy what it must not take. Whatever they send, the session stays with what it held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.peer import Peer
from swarm.ids import SessionId
from swarm.node.node import SwarmNode
from swarm.node.sessions import Counts
from swarm.protocol import STATE_STREAM, Body, FrameStream, StreamClosed, encode, pb
from tests.node.conftest import Chain
from tests.node.copying import opening
from tests.node.harness import CHUNK, CONTEXT, Session, client_peer, config, hear, say, until
from tests.protocol.strategies import any_body

aio = pytest.mark.asyncio(loop_scope="module")

HELD = 5
LAYERS = range(3)
KEYS = VALUES = 128  # bytes of a row


def rows(layer: int, first: int, count: int, value: float = 0.5, **changes: object) -> pb.KvRows:
    data = np.full(count * (KEYS + VALUES) // 2, value, "<f2").tobytes()
    made = pb.KvRows(layer=layer, first=first, count=count, key_bytes=KEYS, value_bytes=VALUES, data=data)
    for name, changed in changes.items():
        setattr(made, name, changed)
    return made


def journalled(session_id: bytes, start: int = 0, count: int = 4, width: int = 128, **changes: Any) -> pb.Step:
    fields = {"replay": True, "kind": pb.PREFILL, "encoding": pb.F32_LE, **changes}
    n_bytes = count * width * 4
    return pb.Step(
        session_id=session_id,
        epoch=1,
        step=1,
        start=start,
        n_tokens=count,
        width=width,
        payload_bytes=n_bytes,
        payload=bytes(n_bytes),
        **fields,
    )


class Fed:
    """An understudy on ``node`` whose primary is the client itself."""

    def __init__(self, peer: Peer, node: SwarmNode, control: FrameStream, session: Session) -> None:
        self.peer, self.node, self.control, self.session = peer, node, control, session

    def offer(self, **changes: object) -> pb.StateOffer:
        made = pb.StateOffer(
            session_id=self.session.id,
            artifact_id=self.node.manifest.artifact_id,
            numerics_id=self.node.shared.host.info.numerics_id,
            run=pb.Layers(first=0, last=3),
        )
        made.MergeFrom(pb.StateOffer(**changes))  # type: ignore[arg-type]
        return made

    async def stream(self, peer: Peer | None = None, **changes: object) -> FrameStream:
        stream = await say(peer or self.peer, self.node, STATE_STREAM)
        await stream.send(self.offer(**changes))
        return stream

    async def accepted(self) -> FrameStream:
        stream = await self.stream()
        assert isinstance(await hear(stream), pb.StateAccepted)
        return stream

    async def fill(self, stream: FrameStream, count: int = HELD) -> None:
        for layer in LAYERS:
            await stream.send(rows(layer, 0, count))
        await stream.send(pb.Ping(nonce=7))
        while not (isinstance(said := await hear(stream), pb.Pong) and said.nonce == 7):
            assert isinstance(said, pb.StateHeld | pb.Pong), said
        assert said.position == count

    @property
    def position(self) -> int:
        return self.node.shared.lives[SessionId(self.session.id)].session.position


@asynccontextmanager
async def fed(peer: Peer, chain: Chain) -> AsyncIterator[Fed]:
    mine = Session(peer, chain, keep_journal=True)
    message = opening(mine, 0)
    message.understudy_of.CopyFrom(pb.Neighbour(peer_id=peer.peer_id))
    control = await say(peer, chain[0], "glm-swarm/1/control")
    await control.send(message)
    assert isinstance(await hear(control), pb.Opened)
    yield Fed(peer, chain[0], control, mine)
    await control.close()


async def refusal(stream: FrameStream) -> pb.Error:
    while isinstance(error := await hear(stream), pb.Pong | pb.StateHeld | pb.StateAccepted):
        pass
    assert isinstance(error, pb.Error), error
    await stream.close()
    return error


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stranger(nodes: Chain) -> AsyncIterator[Peer]:
    async with client_peer(*nodes) as peer:
        yield peer


@aio
async def test_rows_count_once_every_layer_has_them(chain: Chain, client: Peer) -> None:
    async with fed(client, chain) as mine:
        stream = await mine.accepted()
        await stream.send(rows(0, 0, 9))
        await stream.send(rows(1, 0, 7))
        assert mine.position == 0
        await stream.send(rows(2, 0, HELD))
        await until(lambda: mine.position == HELD)
        await stream.send(rows(1, 3, 1))
        await until(lambda: mine.position == 4)
        await mine.control.send(pb.Ping(nonce=1))
        assert (await hear(mine.control)).position == 4  # type: ignore[attr-defined]


@aio
async def test_layers_that_the_understudy_lacks_are_skipped(chain: Chain, client: Peer) -> None:
    async with fed(client, chain) as mine:
        stream = await mine.stream(run=pb.Layers(first=0, last=6))
        assert isinstance(await hear(stream), pb.StateAccepted)
        await stream.send(rows(4, 0, HELD))
        await stream.send(rows(4, 30, HELD, key_bytes=1, value_bytes=255))
        await mine.fill(stream)


@aio
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"session_id": bytes(16)}, pb.UNKNOWN_SESSION),
        ({"artifact_id": "0" * 64}, pb.WRONG_ARTIFACT),
        ({"numerics_id": "another/engine"}, pb.NUMERICS_MISMATCH),
        ({"run": pb.Layers(first=1, last=3)}, pb.ILLEGAL_RANGE),
        ({"run": pb.Layers(last=2)}, pb.ILLEGAL_RANGE),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_offers_that_do_not_fit(chain: Chain, client: Peer, change: dict[str, Any], code: int) -> None:
    async with fed(client, chain) as mine:
        if "run" in change:
            stream = await say(client, chain[0], STATE_STREAM)
            offer = mine.offer()
            offer.run.CopyFrom(change["run"])
            await stream.send(offer)
        else:
            stream = await mine.stream(**change)
        assert (await refusal(stream)).code == code
        await mine.fill(await mine.accepted())


@aio
async def test_only_the_primary_may_offer(chain: Chain, client: Peer, stranger: Peer) -> None:
    async with fed(client, chain) as mine:
        assert (await refusal(await mine.stream(stranger))).code == pb.NOT_ALLOWED
        await mine.fill(await mine.accepted())


@aio
async def test_a_hop_that_computes_takes_no_state(chain: Chain, client: Peer) -> None:
    mine = await Session(client, chain).open()
    stream = await Fed(client, chain[0], mine.control[0], mine).stream()
    assert (await refusal(stream)).code == pb.NOT_ALLOWED
    await mine.close()


ILLEGAL: dict[str, tuple[pb.KvRows, int]] = {
    "layer not offered": (rows(3, 0, 1), pb.ILLEGAL_RANGE),
    "no such layer": (rows(4096, 0, 1), pb.ILLEGAL_RANGE),
    "other row sizes": (rows(1, 0, 1, key_bytes=64, value_bytes=192), pb.MALFORMED),
    "indexer keys": (rows(1, 0, 1, value_bytes=0, indexer_bytes=128), pb.MALFORMED),
    "shorter rows": (rows(1, 0, 2, key_bytes=64, value_bytes=64, data=bytes(256)), pb.MALFORMED),
    "a gap": (rows(1, HELD + 1, 1), pb.GAP),
    "beyond the context": (rows(1, 0, CONTEXT + 1), pb.CONTEXT_FULL),
    "far beyond": (rows(1, 1 << 23, 1), pb.CONTEXT_FULL),
    "infinite": (rows(1, 0, 3, value=np.inf), pb.MALFORMED),
    "not a number": (rows(2, HELD, 3, value=np.nan), pb.MALFORMED),
}


@aio
@pytest.mark.parametrize("name", ILLEGAL)
async def test_rows_that_do_not_fit(chain: Chain, client: Peer, name: str) -> None:
    bad, code = ILLEGAL[name]
    async with fed(client, chain) as mine:
        stream = await mine.accepted()
        await mine.fill(stream)
        await stream.send(bad)
        assert (await refusal(stream)).code == code
        assert mine.position == HELD
        await mine.fill(await mine.accepted())


WRONG_STEPS: dict[str, tuple[Callable[[bytes], pb.Step], int]] = {
    "of another session": (lambda _id: journalled(bytes(16)), pb.NOT_ALLOWED),
    "no replay": (lambda id_: journalled(id_, replay=False), pb.NOT_ALLOWED),
    "another width": (lambda id_: journalled(id_, width=64), pb.MALFORMED),
    "tokens": (
        lambda id_: pb.Step(session_id=id_, epoch=1, step=1, n_tokens=1, kind=pb.DECODE, tokens=[1], replay=True),
        pb.MALFORMED,
    ),
    "too many rows": (lambda id_: journalled(id_, count=CHUNK + 1), pb.TOO_LARGE),
    "beyond the context": (lambda id_: journalled(id_, start=CONTEXT - 3), pb.TOO_LARGE),
}


@aio
@pytest.mark.parametrize("name", WRONG_STEPS)
async def test_steps_that_are_no_journal(chain: Chain, client: Peer, name: str) -> None:
    made, code = WRONG_STEPS[name]
    async with fed(client, chain) as mine:
        stream = await mine.accepted()
        await mine.fill(stream)
        await stream.send(made(mine.session.id))
        assert (await refusal(stream)).code == code
        assert mine.position == HELD
        assert chain[0].shared.journals.used_bytes == 0


@aio
async def test_a_journal_is_kept_and_cut_with_the_rows(chain: Chain, client: Peer) -> None:
    async with fed(client, chain) as mine:
        stream = await mine.accepted()
        await mine.fill(stream, 8)
        await stream.send(journalled(mine.session.id, 0, 4))
        await stream.send(journalled(mine.session.id, 4, 4))
        await until(lambda: chain[0].shared.journals.used_bytes == 8 * 128 * 4)
        live = chain[0].shared.lives[SessionId(mine.session.id)]
        assert live.journal_first == 0
        await stream.send(rows(0, 4, 1))
        await until(lambda: chain[0].shared.journals.used_bytes == 4 * 128 * 4)


@aio
async def test_a_second_stream_takes_the_place_of_the_first(chain: Chain, client: Peer) -> None:
    async with fed(client, chain) as mine:
        first = await mine.accepted()
        second = await mine.accepted()
        assert (await refusal(first)).code == pb.NOT_ALLOWED
        await mine.fill(second)


@aio
async def test_nothing_is_taken_after_the_understudy_has_taken_its_place(chain: Chain, client: Peer) -> None:
    async with fed(client, chain) as mine:
        stream = await mine.accepted()
        await mine.fill(stream)
        await stream.send(rows(0, HELD, 4))  # a block that does not become whole
        message = mine.session.opening(0)
        await mine.control.send(
            pb.Reroute(
                session_id=mine.session.id,
                epoch=2,
                predecessor=message.predecessor,
                successor=message.successor,
                keep_tokens=CONTEXT,
                successor_position=HELD,
            )
        )
        said = await hear(mine.control)
        assert isinstance(said, pb.Rerouted) and said.position == HELD
        assert (await refusal(stream)).code == pb.NOT_ALLOWED
        assert (await refusal(await mine.stream())).code == pb.NOT_ALLOWED


@aio
async def test_the_session_ends_with_rows_under_way(chain: Chain, client: Peer) -> None:
    async with fed(client, chain) as mine:
        stream = await mine.accepted()
        for _ in range(50):
            await stream.send(rows(0, 0, CONTEXT))
        await mine.control.send(pb.Close(session_id=mine.session.id))
        assert (await refusal(stream)).code == pb.UNKNOWN_SESSION


# --- anything at all


class Background:
    """A loop in a thread of its own: hypothesis calls plain functions."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, awaitable: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def background(llama_untied_path: Path, folder: Path) -> Iterator[tuple[Background, Peer, Chain]]:
    loop = Background()
    node = SwarmNode(config(llama_untied_path, "0:3", folder))
    try:
        loop.run(node.__aenter__())
        connection = client_peer(node)
        peer = loop.run(connection.__aenter__())
        yield loop, peer, (node, node)
        loop.run(connection.__aexit__(None, None, None))
        loop.run(node.__aexit__(None, None, None))
    finally:
        loop.close()


likely = st.builds(
    rows, st.integers(0, 3), st.integers(0, 8), st.integers(1, 8), st.sampled_from([0.5, -1.0, 0.5, np.inf])
)
frames = st.one_of(
    likely,
    likely,
    any_body,
    st.just("offer"),
    st.builds(lambda start, count: ("step", start, count), st.integers(0, 12), st.integers(1, 6)),
    st.builds(pb.Ping, nonce=st.integers(0, 3)),
    st.binary(min_size=1, max_size=40),
)


def as_bytes(mine: Fed, frame: object) -> bytes:
    match frame:
        case "offer":
            return encode(mine.offer())
        case ("step", int(start), int(count)):
            return encode(journalled(mine.session.id, start, count))
        case bytes():
            return frame
        case _:
            assert isinstance(frame, Body)
            return encode(frame)


@settings(max_examples=25, deadline=None)
@given(offered=st.booleans(), sent=st.lists(frames, max_size=8))
def test_any_frames_in_any_order(
    background: tuple[Background, Peer, Chain], *, offered: bool, sent: list[object]
) -> None:
    """Nothing but an Error or the end of the stream, and the node counts nothing for it afterwards."""
    loop, peer, chain = background
    node = chain[0]

    async def run() -> None:
        async with fed(peer, chain) as mine:
            stream = await say(peer, node, STATE_STREAM)
            await until(lambda: node.service.open_streams == 2)
            data = b"".join(as_bytes(mine, frame) for frame in (["offer"] if offered else []) + sent)
            stream._writer.write(data)
            stream._writer.write_eof()
            heard = await everything(stream)
            await until(lambda: node.service.open_streams == 1)
            assert all(isinstance(one, pb.StateAccepted | pb.StateHeld | pb.Pong | pb.Error) for one in heard), heard
            assert not [one for one in heard if isinstance(one, pb.Error) and one.code == pb.INTERNAL]
            live = node.shared.lives[SessionId(mine.session.id)]
            assert 0 <= live.session.position <= CONTEXT
            await mine.fill(await mine.accepted())
        await until(partial(nothing_is_left, node))

    loop.run(run())


async def everything(stream: FrameStream) -> list[object]:
    heard: list[object] = []
    try:
        while (one := await hear(stream)) is not None:
            heard.append(one)
    except StreamClosed:
        pass
    await stream.close()
    return heard


def nothing_is_left(node: SwarmNode) -> bool:
    journals = node.shared.journals
    return node.counts() == Counts() and node.service.open_streams == journals.n_open == journals.used_bytes == 0

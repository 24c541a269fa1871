"""Peers that want a node's memory, its files or its patience, and operators with odd names."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from dht.peer import Peer
from shim.types import ContextSpec
from swarm.node.config import Limits
from swarm.node.node import SwarmNode
from swarm.node.sessions import Counts
from swarm.protocol import CONTROL_STREAM, DATA_STREAM, INFO_STREAM, STATE_STREAM, FrameStream, PartJoiner, encode, pb
from tests.node.conftest import Chain
from tests.node.harness import Session, client_peer, config, ended, hear, say, session, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(10))


async def refusal(stream: FrameStream) -> pb.Error:
    while isinstance(error := await hear(stream), pb.Pong):
        pass
    assert isinstance(error, pb.Error), error
    assert await ended(stream)
    return error


@pytest.mark.parametrize("protocol", [INFO_STREAM, CONTROL_STREAM, DATA_STREAM, STATE_STREAM])
async def test_no_room_is_made_for_a_step_outside_a_session(chain: Chain, client: Peer, protocol: str) -> None:
    """Sixty megabytes a stream, a thousand streams a peer: the first frame of such a step is the last."""
    rows, width = 1 << 14, 1 << 10
    step = pb.Step(
        session_id=bytes(16),
        epoch=1,
        step=1,
        n_tokens=rows,
        kind=pb.PREFILL,
        encoding=pb.F32_LE,
        width=width,
        payload_bytes=4 * rows * width,
        payload=bytes(1 << 18),
    )
    stream = await say(client, chain[0], protocol)
    await stream.send(step)
    assert (await refusal(stream)).code == pb.TOO_LARGE


async def test_an_attached_stream_takes_no_more_than_a_chunk(chain: Chain, client: Peer) -> None:
    entry = chain[0]
    async with session(client, *chain) as mine:
        assert mine.data is not None
        live = entry.shared.lives[mine.id]  # type: ignore[index]
        assert live.data is not None
        assert live.data.max_step_bytes == live.session.terms.chunk_tokens * entry.manifest.n_embd * 4


async def test_streams_are_counted_over_all_peers(llama_untied_path: Path, folder: Path) -> None:
    limited = replace(config(llama_untied_path, "0:6", folder), limits=Limits(streams=3))
    async with (
        SwarmNode(limited) as node,
        client_peer(node) as one,
        client_peer(node) as other,
    ):
        held = [await say(peer, node, INFO_STREAM) for peer in (one, other, one)]
        await until(lambda: node.service.open_streams == 3)
        assert (await refusal(await say(other, node, INFO_STREAM))).code == pb.LIMIT_REACHED
        await held[0].close()
        await until(lambda: node.service.open_streams == 2)
        await held[1].send(pb.DescribeRequest())
        assert isinstance(await hear(held[1]), pb.NodeDescription)


async def test_who_asks_and_does_not_read_is_let_go(llama_untied_path: Path, folder: Path) -> None:
    impatient = config(llama_untied_path, "0:6", folder, info_seconds=1.0)
    async with SwarmNode(impatient) as node, client_peer(node) as peer:
        _, writer = await peer.open_stream(node.peer_id, INFO_STREAM)
        question = pb.ArtifactRequest(artifact_id=node.manifest.artifact_id, piece=pb.HEADER)
        writer.write(4000 * encode(question))  # answers of 40 MB
        await until(lambda: node.service.open_streams == 1)
        await until(lambda: node.service.open_streams == 0)
        writer.close()


async def test_a_header_is_read_once_for_all(chain: Chain, client: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    node = chain[0]
    expected = node.config.model.path.read_bytes()[: node.manifest.files[0].header_bytes]
    pieces = []
    for _ in range(2):
        stream = await say(client, node, INFO_STREAM)
        await stream.send(pb.ArtifactRequest(artifact_id=node.manifest.artifact_id, piece=pb.HEADER))
        joiner, whole = PartJoiner(1 << 24), None
        while whole is None:
            part = await hear(stream)
            assert isinstance(part, pb.ArtifactPart)
            whole = joiner.add(part)
        pieces.append(whole)
        monkeypatch.setattr("swarm.node.info._read_start", None)  # it is not needed again
    assert pieces == [expected, expected]


async def test_a_hung_engine_does_not_hold_up_leaving(llama_untied_path: Path, folder: Path) -> None:
    async with SwarmNode(config(llama_untied_path, "0:6", folder)) as node, client_peer(node) as peer:
        mine = await Session(peer, (node,)).open()
        data = await mine.attach()
        await mine.compute(0, PROMPT)
        pid = node.shared.host.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await data.send_step(mine.step(len(PROMPT), [1]))
        await until(lambda: node.shared.queue == 1)
        node._stop.set()
        async with asyncio.timeout(15):
            await node.wait()
        assert node.counts() == Counts()
        await mine.close()


async def test_names_that_others_would_not_show_are_made_printable(
    chain: Chain, llama_untied_path: Path, folder: Path
) -> None:
    """A record with a control character is dropped by everyone: the node would serve and never be found."""
    odd = Path(shutil.copy(llama_untied_path, folder / "od\u200dd\u00a0na\x1bme\udcff.gguf"))
    base = config(odd, "0:6", folder, chain[0].addresses)
    named = replace(base, network=replace(base.network, public_name="a\tb\x1b[31m\U0001f468\u200d\U0001f469\udcff"))
    async with SwarmNode(named) as node, client_peer(node) as peer:
        seen = {record.peer_id: record for record in await chain[0].records()}
        record = seen[node.peer_id]
        assert record.artifact_name == "od d na me" and record.artifact_name.isprintable()
        assert record.public_name == "a b [31m\U0001f468 \U0001f469"
        stream = await say(peer, node, INFO_STREAM)
        await stream.send(pb.DescribeRequest())
        said = await hear(stream)
        assert isinstance(said, pb.NodeDescription) and said.public_name == record.public_name


async def test_a_step_wants_no_more_rows_than_memory_was_planned_for(llama_untied_path: Path, folder: Path) -> None:
    base = config(llama_untied_path, "0:6", folder)
    roomy = replace(base, model=replace(base.model, contexts=(ContextSpec(1, 256),), chunk_tokens=128))
    async with SwarmNode(roomy) as node, client_peer(node) as peer:
        mine = Session(peer, (node,))
        opening = mine.opening(0)
        opening.context_tokens, opening.chunk_tokens = 256, 128
        control = await say(peer, node, CONTROL_STREAM)
        mine.control = [control]
        await control.send(opening)
        assert isinstance(await hear(control), pb.Opened)
        data = await mine.attach()
        every = pb.OutputRequest(all_rows=True, top=1)
        for count in (66, 128):
            await data.send_step(mine.step(0, [1] * count, output=every))
            error = await hear(control)
            assert isinstance(error, pb.Error) and error.code == pb.TOO_LARGE
        answer = await mine.compute(0, [1] * 65, output=every)
        assert len(answer.rows) == 65
        answer = await mine.compute(65, [1] * 128)
        assert [row.position for row in answer.rows] == [192]
        await mine.close()

"""What hivemind's own client does badly, mended."""

from __future__ import annotations

import asyncio
import logging
from uuid import uuid4

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2

from dht.clock import measure
from dht.peer import Peer
from tests.dht.echo_node import ECHO, echo
from tests.dht.support import StartPeer, until


@pytest.mark.parametrize("said", [b"", b"\x30", b"\x30half of a greeting"], ids=["nothing", "a byte", "a part"])
async def test_a_stream_that_ends_before_it_begins_is_closed_and_no_news(
    start_peer: StartPeer, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    """So it looks when the opener is killed, or the daemon, between opening a stream and greeting."""
    server, client = await start_peer(), await start_peer()
    await server.serve_stream(ECHO, echo)
    path = server.p2p._client_listen_maddr.value_for_protocol("unix")
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(said)
    writer.write_eof()
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    reader, writer = await client.open_stream(server.peer_id, ECHO, await server.addresses())
    writer.write(b"still served")
    assert await reader.readexactly(12) == b"still served"
    writer.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_answer_to_a_call_that_was_cancelled_harms_no_later_call(start_peer: StartPeer) -> None:
    server = await start_peer()
    client: Peer = await start_peer(server)
    control = client.p2p._client.control
    call_id = uuid4()
    cancelled = control._pending_calls[call_id] = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    question = p2pd_pb2.CallUnaryRequest(peer=server.p2p.peer_id.to_bytes(), proto="nothing that is served", data=b"")
    await control._pending_messages.put(p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, callUnary=question))
    async with asyncio.timeout(10):
        assert await measure(client) is not None, "answers come in order, so the cancelled one was read before"
    assert not control._read_task.done()


async def test_nothing_is_kept_of_a_request_that_its_sender_cancelled(start_peer: StartPeer) -> None:
    server = await start_peer()
    client: Peer = await start_peer(server)
    started = asyncio.Event()

    async def hang(_request: bytes, _remote: PeerID) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    ours, theirs = server.p2p._client.control, client.p2p._client.control
    await ours.add_unary_handler("hang", hang)
    call = asyncio.create_task(theirs.call_unary_handler(server.p2p.peer_id, "hang", bytes(1 << 20)))
    await started.wait()
    assert len(ours._handler_tasks) == 1
    call.cancel()
    await until(lambda: not ours._handler_tasks)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await measure(client) is not None

"""Requests to the libp2p daemon over its unix socket.

hivemind's own client has these calls, too, but leaves the socket open when the daemon says no or the caller is
cancelled, and gives a stream's reader a buffer of 64 KiB only. What the daemon hands over, incoming streams, is still
taken by hivemind, and so are calls of the DHT: the functions ``mind_...`` mend what they do badly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

from dht.errors import PeerUnreachable, StreamRefused

logger = logging.getLogger(__name__)

STREAM_BUFFER_BYTES = 1 << 20  # a reader stops the sender at twice this

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(p2p: P2P, peer_id: str, transports: Sequence[str]) -> None:
    """Dials the peer unless it is connected. Raises PeerUnreachable."""
    request = p2pd_pb2.ConnectRequest(peer=_id_bytes(peer_id), addrs=_address_bytes(transports))
    async with _connection(p2p, peer_id) as (reader, writer):
        await _call(reader, writer, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request), peer_id)
        writer.close()


async def connected_peers(p2p: P2P) -> dict[str, tuple[str, ...]]:
    """The transports of each connected peer, by id. Raises PeerUnreachable when the daemon is gone."""
    own: str = p2p.peer_id.to_base58()
    async with _connection(p2p, own) as (reader, writer):
        response = await _call(reader, writer, p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), own)
        writer.close()
    return {PeerID(info.id).to_base58(): _address_texts(info.addrs) for info in response.peers}


async def open_stream(p2p: P2P, peer_id: str, protocol: str) -> Stream:
    """Raises StreamRefused, PeerUnreachable."""
    request = p2pd_pb2.StreamOpenRequest(peer=_id_bytes(peer_id), proto=[protocol])
    async with _connection(p2p, peer_id) as (reader, writer):
        await _call(reader, writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request), peer_id)
        return reader, writer


class OpenCalls(dict[Any, asyncio.Future[Any]]):
    """Calls that wait for the daemon's answer. One that was cancelled a moment ago counts as gone: hivemind would give
    it the answer, which raises, and from then on no answer would be read any more."""

    def __contains__(self, call_id: object) -> bool:
        call = self.get(call_id)
        return call is not None and not call.done()


class RunningHandlers(dict[Any, asyncio.Task[None]]):
    """Requests of others that are being answered. hivemind keeps those that were cancelled, and the request with it."""

    def __setitem__(self, call_id: Any, task: asyncio.Task[None]) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self.pop(call_id, None))


def mind_cancelled_calls(p2p: P2P) -> None:
    """Call it before the first call in either direction."""
    p2p._client.control._pending_calls = OpenCalls()
    p2p._client.control._handler_tasks = RunningHandlers()


def mind_lost_streams(p2p: P2P) -> None:
    """Call it before any stream is served. A stream whose opener has died, or whose daemon has, may end before it has
    said what it is for: hivemind lets asyncio log that with a traceback, and keeps the connection."""
    client = p2p._client.control
    take = client._handler

    async def take_or_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await take(reader, writer)
        except (OSError, EOFError) as error:
            logger.debug("a stream ended before it began: %s", error)
            writer.close()

    client._handler = take_or_close


@contextlib.asynccontextmanager
async def _connection(p2p: P2P, peer_id: str) -> AsyncIterator[Stream]:
    """A connection to the daemon, closed when the block fails or is cancelled; kept open otherwise."""
    path = p2p.daemon_listen_maddr.value_for_protocol("unix")
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=STREAM_BUFFER_BYTES)
    except OSError as error:
        raise PeerUnreachable(peer_id, "the libp2p daemon of this process is gone") from error
    try:
        yield reader, writer
    except BaseException:
        writer.close()
        raise


async def _call(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: p2pd_pb2.Request, peer_id: str
) -> p2pd_pb2.Response:
    response = p2pd_pb2.Response()
    try:
        await write_pbmsg(writer, request)
        await read_pbmsg_safe(reader, response)
    except (OSError, EOFError) as error:
        raise PeerUnreachable(peer_id, "the libp2p daemon of this process is gone") from error
    if response.type == p2pd_pb2.Response.ERROR:
        raise _failure(peer_id, response.error.msg)
    return response


def _failure(peer_id: str, message: str) -> PeerUnreachable:
    if "protocols not supported" in message:
        return StreamRefused(peer_id, "it does not serve this protocol")
    return PeerUnreachable(peer_id, _reason(message))


def _reason(message: str) -> str:
    """The daemon lists every address it knows, most of them with "dial backoff" for having failed a moment ago."""
    if "routing: not found" in message or "no addresses" in message:
        return "nobody knows its address"
    if "no good addresses" in message:
        return "its host name is unknown"
    first, *dials = [line.strip(" *") for line in message.splitlines() if line.strip()]
    telling = [line for line in dials if not line.endswith("dial backoff")] or dials[:1] or [first]
    return "; ".join(dict.fromkeys(map(_dial_reason, telling)))


def _dial_reason(line: str) -> str:
    if "peer id mismatch" in line:
        return "another peer answers there"
    if line.endswith("dial backoff"):
        return "it could not be reached a moment ago"
    if "negotiate security protocol" in line:
        broke_off = line.endswith(("connection reset by peer", "EOF", "broken pipe"))
        return "the connection broke off at once" if broke_off else "what answers there does not speak libp2p"
    return line.rpartition(": ")[2]


def _id_bytes(peer_id: str) -> bytes:
    try:
        data: bytes = PeerID.from_base58(peer_id).to_bytes()
    except ValueError as error:
        raise PeerUnreachable(peer_id, "this is no peer id") from error
    return data


def _address_bytes(transports: Sequence[str]) -> list[bytes]:
    """Addresses that libp2p knows; a peer may have told one of a newer kind."""
    known = []
    for transport in transports:
        with contextlib.suppress(MultiaddrError, ValueError):
            known.append(Multiaddr(transport).to_bytes())
    return known


def _address_texts(addresses: Sequence[bytes]) -> tuple[str, ...]:
    known = []
    for address in addresses:
        with contextlib.suppress(MultiaddrError, ValueError):
            known.append(str(Multiaddr(address)))
    return tuple(known)

"""This process as a peer: one libp2p daemon and one DHT node, in the caller's event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from dht import control
from dht.addresses import PeerAddress, loopback_last, parse_listen_address, parse_peer_address, transport_of
from dht.daemon import Daemon, DaemonConfig, start_daemon
from dht.errors import BadAddress, InitialPeersUnreachable, PeerUnreachable
from dht.guard import guard
from dht.identity import Identity
from dht.table import NODE_SETTINGS, Table
from dht.validator import EnvelopeValidator

logger = logging.getLogger(__name__)

ALL_INTERFACES = "/ip4/0.0.0.0/tcp/0"
CONNECT_SECONDS = 8.0
CLOSE_SECONDS = 2.0
MAX_REMEMBERED = 64

StreamHandler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """Made by ``start``; ends with ``close`` or as a context manager, and leaves no process behind.

    ``clock`` is what expiries are compared with; tests shift it.
    """

    def __init__(self, daemon: Daemon, node: DHTNode, validator: EnvelopeValidator, clock: Callable[[], float]) -> None:
        self.p2p = daemon
        self.node = node
        self.clock = clock
        self.validator = validator
        self.peer_id: str = daemon.peer_id.to_base58()
        self.table = Table(node, self.peer_id, clock)
        self.initial_peers: tuple[PeerAddress, ...] = ()
        self.lost: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Done, with the exit code, when the libp2p daemon ended by itself: this peer can't do anything any more."""
        self._remembered: dict[str, tuple[str, ...]] = {}
        self._handlers: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._watch = asyncio.create_task(self._watch_daemon())

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        listen: Sequence[str] = (ALL_INTERFACES,),
        initial_peers: Sequence[str] = (),
        client_only: bool = False,
        announce: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
        nat_port_map: bool = False,
        relay: bool = False,
    ) -> Peer:
        """A peer that has met those of ``initial_peers`` that answer.

        ``client_only`` neither listens nor stores entries of others. ``announce`` are addresses to tell instead of
        those found on this machine. Raises BadAddress, PortTaken, ListenFailed, NetworkStartFailed and, when there are
        initial peers but none answers, InitialPeersUnreachable. Cancelling it leaves nothing behind.
        """
        contacts = tuple(dict.fromkeys(parse_peer_address(text) for text in initial_peers))
        config = DaemonConfig(
            () if client_only else tuple(parse_listen_address(text) for text in listen),
            tuple(_announced(text) for text in announce),
            nat_port_map,
            relay,
        )
        daemon = await start_daemon(identity, config)
        try:
            validator = EnvelopeValidator(clock)
            node = await DHTNode.create(
                p2p=daemon, client_mode=client_only, record_validator=validator, **NODE_SETTINGS
            )
            guard(node.protocol)
            peer = cls(daemon, node, validator, clock)
        except BaseException:
            await daemon.stop()
            raise
        try:
            peer.initial_peers = tuple(contact for contact in contacts if contact.peer_id != peer.peer_id)
            for address, reason in await peer.join():
                logger.warning("initial peer %s does not answer (%s); going on with the others", address, reason)
        except BaseException:
            await peer.close()
            raise
        return peer

    async def join(self) -> list[tuple[str, str]]:
        """Meets the initial peers that aren't known yet; with none known and none answering, those remembered.

        Returns (address, reason) of those that did not answer. Raises InitialPeersUnreachable when afterwards no peer
        is known, though there are some to ask.
        """
        known = self.known_peers()
        failures = await self._meet([contact for contact in self.initial_peers if contact.peer_id not in known])
        if not self.known_peers() and self._remembered:
            await self._meet([PeerAddress(at, who) for who, found in self._remembered.items() for at in found])
        if failures and not self.known_peers():
            raise InitialPeersUnreachable(failures)
        if known != self.known_peers():
            await self.look_around()
        return failures

    async def look_around(self) -> None:
        """Fills the routing table with the nodes that those met know."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                await self.node.find_nearest_nodes([self.node.node_id])

    def known_peers(self) -> set[str]:
        """Ids of the nodes in the DHT's routing table: those that answered last time."""
        return {peer_id.to_base58() for peer_id in self.node.protocol.routing_table.peer_id_to_uid}

    async def remember(self) -> None:
        """Notes where the connected nodes are, for a ``join`` after all contacts were lost.

        Raises PeerUnreachable when the daemon is gone.
        """
        known = self.known_peers()
        for who, transports in (await control.connected_peers(self.p2p)).items():
            if who in known and transports:
                self._remembered.pop(who, None)
                self._remembered[who] = transports
        while len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    async def addresses(self) -> list[str]:
        """Where this peer can be reached, with its id; loopback last. None for a client.

        Raises PeerUnreachable when the daemon is gone.
        """
        try:
            found = await self.p2p.get_visible_maddrs(latest=True)
        except (OSError, EOFError) as error:
            raise PeerUnreachable(self.peer_id, "the libp2p daemon of this process is gone") from error
        except ValueError:  # hivemind's way to say that there are none
            return []
        return loopback_last(map(str, found))

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Dials unless connected. Passes over unusable addresses and those of others. Raises PeerUnreachable."""
        transports = [found for text in addresses if (found := transport_of(text, peer_id)) is not None]
        if addresses and not transports:
            raise PeerUnreachable(peer_id, "none of its addresses can be used")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await control.connect(self.p2p, peer_id, transports)
        except TimeoutError:
            raise PeerUnreachable(peer_id, f"no answer within {CONNECT_SECONDS:g} s") from None

    async def serve_stream(self, protocol: str, handler: StreamHandler) -> None:
        """Runs ``handler(peer_id, reader, writer)`` for each incoming stream; the id is authenticated by libp2p.

        The stream is closed when the handler returns. What it raises is logged and hurts nothing else. ``close``
        cancels the handlers that still run.
        """

        async def on_stream(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._handlers.add(task)
            remote: str = info.peer_id.to_base58()
            try:
                await handler(remote, reader, writer)
            except asyncio.CancelledError:
                if not self._closing:  # otherwise it is ours, and Python 3.11 would log a cancelled handler as an error
                    raise
            except (OSError, EOFError) as error:
                logger.debug("stream %s from %s broke: %s", protocol, remote, error)
            except Exception:
                logger.exception("serving stream %s to %s failed; other streams go on", protocol, remote)
            finally:
                self._handlers.discard(task)
                writer.close()

        await self.p2p.add_binary_stream_handler(protocol, on_stream)

    async def open_stream(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> control.Stream:
        """A stream to the peer, dialled at ``addresses`` when it isn't connected; without any, the network is asked.

        The reader gives EOF both when the other side closed the stream and when it died. There is no half-closing:
        ``write_eof`` ends both directions. Close the writer; what was written before arrives. Raises StreamRefused,
        PeerUnreachable.
        """
        if addresses:
            await self.connect(peer_id, addresses)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await control.open_stream(self.p2p, peer_id, protocol)
        except TimeoutError:
            raise PeerUnreachable(peer_id, f"no answer within {CONNECT_SECONDS:g} s") from None

    async def close(self) -> None:
        """Idempotent. Cancels the running stream handlers and ends the daemon."""
        if self._closing:
            return
        self._closing = True
        for task in self._handlers:
            task.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if self.lost.done() else CLOSE_SECONDS):
                await self.node.shutdown()
        await self.p2p.stop()
        await self._watch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _meet(self, contacts: Sequence[PeerAddress]) -> list[tuple[str, str]]:
        """(address, reason) of those that did not answer."""
        reasons = await asyncio.gather(*map(self._greet, contacts))
        return [(str(contact), reason) for contact, reason in zip(contacts, reasons, strict=True) if reason]

    async def _greet(self, contact: PeerAddress) -> str:
        """Why the contact did not become a known peer; empty when it did."""
        try:
            await self.connect(contact.peer_id, [str(contact)])
        except PeerUnreachable as error:
            return error.reason
        peer_id = PeerID.from_base58(contact.peer_id)
        protocol = self.node.protocol
        node_id: DHTID | None = await protocol.call_ping(peer_id)
        if node_id is None:
            return "it is no node of a swarm"
        await protocol.update_routing_table(node_id, peer_id, responded=True)
        return ""

    async def _watch_daemon(self) -> None:
        code = await self.p2p.ended()
        if not self._closing:
            logger.error("the libp2p daemon ended with code %d: this peer is off the network; start it again", code)
            self.lost.set_result(code)


def _announced(text: str) -> str:
    """An address to announce may carry the own id, which libp2p adds by itself."""
    transport, mark, peer_id = text.strip().partition("/p2p/")
    placeholder = peer_id if mark else "1" * 46
    if transport_of(f"{transport}/p2p/{placeholder}", placeholder) is None:
        raise BadAddress(f"{text!r} can't be announced; use /ip4/HOST/tcp/PORT")
    return transport

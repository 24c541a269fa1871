"""Starting, reaching and ending peers, over real daemons."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dht.addresses import parse_peer_address
from dht.clock import measure
from dht.control import _dial_reason
from dht.errors import (
    BadAddress,
    InitialPeersUnreachable,
    ListenFailed,
    PeerUnreachable,
    PortTaken,
    StreamRefused,
)
from dht.identity import Identity
from dht.peer import Peer
from tests.dht.echo_node import ECHO, echo
from tests.dht.support import LOOPBACK, StartPeer, daemons, until

NOBODY = Identity.ephemeral().peer_id


@dataclass(frozen=True)
class EchoNode:
    address: str
    pid: int
    daemon_pid: int

    @property
    def peer_id(self) -> str:
        return parse_peer_address(self.address).peer_id


@pytest.fixture
def echo_node() -> Iterator[EchoNode]:
    with subprocess.Popen([sys.executable, "-m", "tests.dht.echo_node"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, pid, daemon_pid = process.stdout.readline().split()
        yield EchoNode(address, int(pid), int(daemon_pid))
        process.kill()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_the_daemon_has_the_identity_of_the_file(start_peer: StartPeer, tmp_path: Path) -> None:
    with Identity.load_or_create(tmp_path / "identity") as identity:
        peer = await start_peer(identity=identity)
        assert peer.peer_id == identity.peer_id
        (address,) = await peer.addresses()
    assert address.startswith("/ip4/127.0.0.1/tcp/") and address.endswith(f"/p2p/{identity.peer_id}")


async def test_listening_on_all_interfaces_tells_loopback_last(start_peer: StartPeer) -> None:
    peer = await start_peer(listen=("/ip4/0.0.0.0/tcp/0",))
    addresses = await peer.addresses()
    assert "127.0.0.1" in addresses[-1]
    assert not any("0.0.0.0" in address for address in addresses)


async def test_addresses_to_announce_replace_those_found(start_peer: StartPeer) -> None:
    peer = await start_peer(announce=("/ip4/192.0.2.99/tcp/4001",))
    assert await peer.addresses() == [f"/ip4/192.0.2.99/tcp/4001/p2p/{peer.peer_id}"]
    with pytest.raises(BadAddress, match="can't be announced"):
        await start_peer(announce=("/ip4/192.0.2.99",))


async def test_a_client_listens_nowhere(start_peer: StartPeer) -> None:
    client = await start_peer(await start_peer(), client_only=True)
    assert await client.addresses() == []
    assert psutil.Process(client.p2p.pid).net_connections("tcp") != []
    assert all(found.status != "LISTEN" for found in psutil.Process(client.p2p.pid).net_connections("tcp"))


async def test_a_taken_port_is_named(taken_port: int, start_peer: StartPeer) -> None:
    with pytest.raises(PortTaken, match=f"port {taken_port} is taken; choose another port") as caught:
        await start_peer(listen=(f"/ip4/127.0.0.1/tcp/{taken_port}",))
    assert caught.value.port == taken_port


async def test_two_peers_cannot_listen_on_one_port(start_peer: StartPeer) -> None:
    """libp2p would let them: it shares ports."""
    address = (await (await start_peer()).addresses())[0]
    with pytest.raises(PortTaken):
        await start_peer(listen=(parse_peer_address(address).transport,))


async def test_a_port_can_be_used_again_at_once(start_peer: StartPeer) -> None:
    first = await start_peer()
    (address,) = await first.addresses()
    await (await start_peer(first)).close()
    await first.close()
    again = await start_peer(listen=(parse_peer_address(address).transport,))
    assert parse_peer_address((await again.addresses())[0]).transport == parse_peer_address(address).transport


async def test_an_address_of_another_machine_cannot_be_listened_on(start_peer: StartPeer) -> None:
    for port in (0, 4001):
        with pytest.raises(ListenFailed, match=r"can't listen on .*192\.0\.2\.254.*; use an address of this machine"):
            await start_peer(listen=(f"/ip4/192.0.2.254/tcp/{port}",))


@pytest.mark.parametrize("text", ["127.0.0.1:4001", "/ip4/127.0.0.1/tcp/4001"])
async def test_bad_addresses_are_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(BadAddress):
        await Peer.start(Identity.ephemeral(), listen=LOOPBACK, initial_peers=(text,))
    with pytest.raises(BadAddress):
        await Peer.start(Identity.ephemeral(), listen=("localhost",))
    assert daemons() == []


async def test_unreachable_initial_peers_are_named_with_the_reason(start_peer: StartPeer) -> None:
    somebody = await start_peer()
    (alive,) = await somebody.addresses()
    refused = f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
    impostor = f"{parse_peer_address(alive).transport}/p2p/{Identity.ephemeral().peer_id}"
    with pytest.raises(InitialPeersUnreachable) as caught:
        await Peer.start(Identity.ephemeral(), listen=LOOPBACK, initial_peers=(refused, impostor))
    assert caught.value.failures[0] == (refused, "connection refused")
    assert caught.value.failures[1] == (impostor, "another peer answers there")
    assert str(caught.value).endswith("check that one of them runs and that its port is open")


async def test_a_host_name_nobody_knows(start_peer: StartPeer) -> None:
    peer = await start_peer()
    with pytest.raises(PeerUnreachable, match="its host name is unknown"):
        await peer.connect(NOBODY, ["/dns4/nobody.invalid/tcp/4001"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "failed to negotiate security protocol: read tcp4: connection reset by peer",
            "the connection broke off at once",
        ),
        ("failed to negotiate security protocol: EOF", "the connection broke off at once"),
        ("failed to negotiate security protocol: invalid header", "what answers there does not speak libp2p"),
        ("[/ip4/192.0.2.2/tcp/34865] dial backoff", "it could not be reached a moment ago"),
        ("[/ip4/192.0.2.2/tcp/34865] dial tcp4: connect: connection refused", "connection refused"),
    ],
)
def test_what_a_failed_dial_means(line: str, reason: str) -> None:
    assert _dial_reason(line) == reason


async def test_a_port_of_another_program(start_peer: StartPeer) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org\r\n" * 10)
        writer.close()

    peer = await start_peer()
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PeerUnreachable, match="what answers there does not speak libp2p"):
            await peer.connect(NOBODY, [f"/ip4/127.0.0.1/tcp/{port}"])


async def test_a_silent_initial_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port where nobody says a word, as behind some firewalls."""
    monkeypatch.setattr("dht.peer.CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{NOBODY}"
        with pytest.raises(InitialPeersUnreachable, match=r"no answer within 0\.5 s"):
            await Peer.start(Identity.ephemeral(), listen=LOOPBACK, initial_peers=(silent,))


async def test_one_initial_peer_that_answers_is_enough(start_peer: StartPeer, caplog: pytest.LogCaptureFixture) -> None:
    somebody = await start_peer()
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
    peer = await Peer.start(Identity.ephemeral(), listen=LOOPBACK, initial_peers=(dead, *await somebody.addresses()))
    async with peer:
        assert peer.known_peers() == {somebody.peer_id}
        await until(lambda: peer.peer_id in somebody.known_peers())
    assert f"initial peer {dead} does not answer (connection refused)" in caplog.text


async def test_a_peer_may_be_given_its_own_address(start_peer: StartPeer, tmp_path: Path) -> None:
    """The same list of peers is used on every machine."""
    with Identity.load_or_create(tmp_path / "identity") as identity:
        own = f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer_id}"
        async with await Peer.start(identity, listen=LOOPBACK, initial_peers=(own,)) as peer:
            assert peer.known_peers() == set()


async def test_a_peer_without_contacts_goes_back_to_those_it_knew(start_peer: StartPeer, tmp_path: Path) -> None:
    first = await start_peer()
    with Identity.load_or_create(tmp_path / "identity") as identity:
        other = await start_peer(first, identity=identity)
        listen = (parse_peer_address((await other.addresses())[0]).transport,)
        await until(lambda: first.known_peers() == {other.peer_id})
        await first.remember()
        await other.close()
        assert await measure(first) is None
        assert first.known_peers() == set()
        await start_peer(identity=identity, listen=listen)

        async def is_back() -> bool:
            await first.join()
            return first.known_peers() == {identity.peer_id}

        await until(is_back)


async def test_cancelling_the_start_leaves_no_daemon() -> None:
    task = asyncio.create_task(Peer.start(Identity.ephemeral(), listen=LOOPBACK))
    await until(lambda: psutil.Process().children() != [])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert daemons() == []


async def test_close_ends_the_daemon_and_removes_its_sockets(start_peer: StartPeer) -> None:
    peer = await start_peer()
    pid = peer.p2p.pid
    sockets = [Path(peer.p2p._daemon_listen_maddr["unix"]), Path(peer.p2p._client_listen_maddr["unix"])]
    await peer.serve_stream(ECHO, echo)
    await until(lambda: all(path.exists() for path in sockets))
    await peer.close()
    await peer.close()
    assert not is_running(pid)
    assert not any(path.exists() for path in sockets)
    assert not peer.lost.done()


async def test_sockets_that_a_killed_process_left_are_removed(start_peer: StartPeer) -> None:
    folder = Path(tempfile.gettempdir())
    stale, live, fresh = (folder / f"glm-swarm-test-{os.getpid()}-{name}.sock" for name in ("stale", "live", "fresh"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(live))
        listening.listen()
        for path in (stale, fresh):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        for path in (stale, live):
            os.utime(path, (1, 1))
        await start_peer()
        assert [path.exists() for path in (stale, live, fresh)] == [False, True, True]
    live.unlink()
    fresh.unlink()


async def test_the_daemon_dies_with_its_process_even_when_it_hangs(echo_node: EchoNode) -> None:
    """Stopped, it does not see that the socket to its process closed: the kernel ends it."""
    os.kill(echo_node.daemon_pid, signal.SIGSTOP)
    os.kill(echo_node.pid, signal.SIGKILL)
    await until(lambda: not is_running(echo_node.daemon_pid), seconds=5)


async def test_ctrl_c_in_a_terminal_is_not_for_the_daemon(start_peer: StartPeer) -> None:
    """It reaches every process of the terminal's group, and half of the daemons end of it."""
    peer = await start_peer()
    assert os.getpgid(peer.p2p.pid) != os.getpgid(0)


async def test_a_lost_daemon_is_reported_once(start_peer: StartPeer, caplog: pytest.LogCaptureFixture) -> None:
    peer, other = await start_peer(), await start_peer()
    os.kill(peer.p2p.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        assert await peer.lost == -signal.SIGKILL
    assert "the libp2p daemon ended with code -9" in caplog.text
    with pytest.raises(PeerUnreachable, match="the libp2p daemon of this process is gone"):
        await peer.connect(other.peer_id, await other.addresses())
    before = time.monotonic()
    await peer.close()
    assert time.monotonic() - before < 1


async def test_a_stream_names_the_peer_and_carries_bytes_both_ways(start_peer: StartPeer) -> None:
    server, client = await start_peer(), await start_peer()
    callers: asyncio.Queue[str] = asyncio.Queue()

    async def handler(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.put_nowait(peer_id)
        await echo(peer_id, reader, writer)

    await server.serve_stream(ECHO, handler)
    reader, writer = await client.open_stream(server.peer_id, ECHO, await server.addresses())
    payload = os.urandom(3 << 20)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send_all(writer, payload))
        assert await reader.readexactly(len(payload)) == payload
    writer.close()
    assert await callers.get() == client.peer_id


async def send_all(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(payload)
    await writer.drain()


async def test_a_reader_that_does_not_read_stops_the_sender(start_peer: StartPeer) -> None:
    server, client = await start_peer(), await start_peer()
    release = asyncio.Event()

    async def handler(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        count = 0
        while not (data := await reader.read(1 << 20)).endswith(b"."):
            count += len(data)
        writer.write((count + len(data) - 1).to_bytes(8, "big"))

    await server.serve_stream(ECHO, handler)
    reader, writer = await client.open_stream(server.peer_id, ECHO, await server.addresses())
    with closing(writer):
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 256 << 20:
                writer.write(bytes(1 << 20))
                sent += 1 << 20
                async with asyncio.timeout(0.5):
                    await writer.drain()
        release.set()
        writer.write(b".")
        assert int.from_bytes(await reader.readexactly(8), "big") == sent
    assert sent <= 64 << 20


async def test_data_written_before_a_close_arrives(start_peer: StartPeer) -> None:
    server, client = await start_peer(), await start_peer()

    async def handler(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(3 << 20))

    await server.serve_stream(ECHO, handler)
    reader, writer = await client.open_stream(server.peer_id, ECHO, await server.addresses())
    with closing(writer):
        assert len(await reader.read()) == 3 << 20


async def test_a_failing_handler_hurts_nobody_else(start_peer: StartPeer, caplog: pytest.LogCaptureFixture) -> None:
    server, client = await start_peer(), await start_peer()

    async def handler(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(4) == b"fail":
            raise KeyError("a bug")
        await echo(peer_id, reader, writer)

    await server.serve_stream(ECHO, handler)
    good_reader, good = await client.open_stream(server.peer_id, ECHO, await server.addresses())
    good.write(b"good")
    bad_reader, bad = await client.open_stream(server.peer_id, ECHO)
    bad.write(b"fail")
    assert await bad_reader.read() == b""
    good.write(b"still here")
    assert await good_reader.readexactly(10) == b"still here"
    good.close()
    bad.close()
    assert f"serving stream {ECHO} to {client.peer_id} failed; other streams go on" in caplog.text


async def test_closing_a_peer_ends_its_handlers(start_peer: StartPeer) -> None:
    server, client = await start_peer(), await start_peer()
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def handler(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await echo(peer_id, reader, writer)
        finally:
            ended.put_nowait(peer_id)

    await server.serve_stream(ECHO, handler)
    reader, writer = await client.open_stream(server.peer_id, ECHO, await server.addresses())
    writer.write(b"x")
    assert await reader.read(1) == b"x"
    await server.close()
    assert ended.get_nowait() == client.peer_id
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()


async def test_what_cannot_be_opened(start_peer: StartPeer) -> None:
    server, client = await start_peer(), await start_peer()
    addresses = await server.addresses()
    with pytest.raises(StreamRefused, match=f"peer {server.peer_id} can't be reached .it does not serve this protocol"):
        await client.open_stream(server.peer_id, "glm-swarm/unknown", addresses)
    with pytest.raises(PeerUnreachable, match="connection refused"):
        await client.open_stream(NOBODY, ECHO, [f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"])
    with pytest.raises(PeerUnreachable, match="none of its addresses can be used"):
        await client.open_stream(NOBODY, ECHO, [*addresses, "/unknown/1"])
    with pytest.raises(PeerUnreachable, match="this is no peer id"):
        await client.open_stream("l0", ECHO)


async def test_a_peer_known_to_others_needs_no_address(start_peer: StartPeer) -> None:
    hub = await start_peer()
    server, client = await start_peer(hub), await start_peer(hub)
    await server.serve_stream(ECHO, echo)
    _, writer = await client.open_stream(server.peer_id, ECHO)
    writer.close()


async def test_the_death_of_the_other_side_is_seen_at_once(start_peer: StartPeer, echo_node: EchoNode) -> None:
    client = await start_peer()
    reader, writer = await client.open_stream(echo_node.peer_id, ECHO, [echo_node.address])
    with closing(writer):
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        os.kill(echo_node.pid, signal.SIGKILL)
        killed = time.monotonic()
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        assert time.monotonic() - killed < 1  # 5-20 ms measured


def test_hivemind_does_not_take_over_logging() -> None:
    theirs = logging.getLogger("hivemind")
    assert (theirs.handlers, theirs.propagate, theirs.level) == ([], True, logging.WARNING)
    assert logging.getLevelName(logging.WARNING) == "WARNING"


async def test_importing_dht_does_not_load_hivemind() -> None:
    code = "import sys, dht, dht.envelope, dht.addresses; print(dht.Identity, 'hivemind' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode().split() == ["<class", "'dht.identity.Identity'>", "False"]

"""The libp2p daemon (p2pd): a child process that lives exactly as long as it is wanted."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import sys
import tempfile
import time
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from dht import control
from dht.addresses import ListenAddress
from dht.errors import ListenFailed, NetworkStartFailed, PortTaken
from dht.identity import Identity
from dht.logs import tame

tame()
logger = logging.getLogger(__name__)

_LAUNCHER = Path(__file__).with_name("_launch.py")
_OTHER_ADDRESS = "use an address of this machine, or /ip4/0.0.0.0/tcp/PORT for all of them"
_SOCKET_PREFIX = "glm-swarm-"
_STALE_SECONDS = 60.0
_START_SECONDS = 15.0
_STOP_SECONDS = 3.0


@dataclass(frozen=True)
class DaemonConfig:
    listen: tuple[ListenAddress, ...]  # empty: outgoing connections only
    announce: tuple[str, ...] = ()
    nat_port_map: bool = False
    relay: bool = False


class Daemon(P2P):  # type: ignore[misc]  # hivemind has no types
    """hivemind's P2P, whose child is started through ``_launch.py`` and logs to this module's logger."""

    _UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/{_SOCKET_PREFIX}"

    def __init__(self) -> None:
        super().__init__()
        _starting.get().append(self)

    @staticmethod
    def _make_process_args(*args: object, **kwargs: object) -> list[str]:
        command: list[str] = P2P._make_process_args(*args, **kwargs)
        return [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *command]

    @staticmethod
    def _log_p2pd_message(line: str) -> None:
        logger.debug("p2pd: %s", line)

    @property
    def pid(self) -> int:
        pid: int = self._child.pid
        return pid

    async def ended(self) -> int:
        """Waits for the daemon's end; its exit code."""
        code: int = await self._child.wait()
        return code

    async def stop(self) -> None:
        """Idempotent. The daemon, its sockets and hivemind's tasks for it are gone afterwards, even if it had hung."""
        self._terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._child.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()
        self._child._transport.close()  # the end of its output may not have been seen yet, and the loop may end now
        tasks = [self._reader_task, self._listen_task]
        if self._client is not None:
            tasks += [self._client.control._read_task, self._client.control._write_task]
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        for address in (self._daemon_listen_maddr, self._client_listen_maddr):
            Path(address.value_for_protocol("unix")).unlink(missing_ok=True)


async def start_daemon(identity: Identity, config: DaemonConfig) -> Daemon:
    """Raises PortTaken, ListenFailed, NetworkStartFailed. Cancelling it leaves no daemon behind."""
    for address in config.listen:
        check_free(address)
    _remove_stale_sockets()
    with identity.file() as key_file:
        task = asyncio.create_task(_create(key_file, config))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with suppress(NetworkStartFailed):
                await (await task).stop()
            raise


def check_free(address: ListenAddress) -> None:
    """libp2p listens with SO_REUSEPORT: a second daemon on a port would silently get half of its connections."""
    if address.port == 0:
        return
    family = socket.AF_INET if address.host.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM if address.is_tcp else socket.SOCK_DGRAM) as probe:
        if address.is_tcp:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a dead one may linger
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((str(address.host), address.port))
            if address.is_tcp:
                probe.listen()
        except OSError as error:
            raise _listen_error(address, error) from error


# The daemons that ``_create`` has begun: hivemind hands out none when the start fails, and doesn't end it either.
_starting: ContextVar[list[Daemon]] = ContextVar("_starting")


async def _create(key_file: Path, config: DaemonConfig) -> Daemon:
    begun: list[Daemon] = []
    _starting.set(begun)
    try:
        daemon: Daemon = await Daemon.create(
            host_maddrs=[address.text for address in config.listen] or None,
            no_listen=not config.listen,
            announce_maddrs=list(config.announce) or None,
            dht_mode="server" if config.listen else "client",
            identity_path=str(key_file),
            check_if_identity_free=False,
            auto_nat=config.nat_port_map,
            nat_port_map=config.nat_port_map,
            use_relay=config.relay,
            startup_timeout=_START_SECONDS,
        )
    except P2PDaemonError as error:
        for failed in begun:
            if failed._child is not None:
                await failed.stop()
        raise _start_error(str(error)) from error
    control.mind_lost_streams(daemon)
    control.mind_cancelled_calls(daemon)
    return daemon


def _start_error(text: str) -> NetworkStartFailed:
    match = re.search(r"listen (?:tcp|udp)\d? (\S+): \w+: (.+?)\]?$", text)
    if match is None:
        reason, advice = text.removeprefix("Daemon failed to start: "), "set HIVEMIND_LOGLEVEL=DEBUG to see more"
        return NetworkStartFailed(f"the libp2p daemon did not start ({reason}); {advice}")
    where, reason = match[1], match[2]
    if "in use" in reason:
        return PortTaken(where, int(where.rpartition(":")[2]))
    return ListenFailed(where, reason, _OTHER_ADDRESS)


def _listen_error(address: ListenAddress, error: OSError) -> ListenFailed:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(address.text, address.port)
    advice = "choose a port above 1023" if error.errno == errno.EACCES else _OTHER_ADDRESS
    return ListenFailed(address.text, os.strerror(error.errno or 0).lower(), advice)


def _remove_stale_sockets() -> None:
    """A killed process leaves its sockets behind: those on which nobody accepts, unless they are just being made."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SOCKET_PREFIX}*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if time.time() - path.stat().st_mtime < _STALE_SECONDS:
                continue
            try:
                probe.setblocking(False)
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()

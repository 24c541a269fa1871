"""The door of a link: accepts connections and carries them to the target."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from bench.links.connection import carry, close, tune
from bench.links.line import Line
from bench.links.link import Link
from bench.links.path import Path

Address = tuple[str, int]  # IPv4 and port

LOOPBACK: Address = ("127.0.0.1", 0)


class Proxy:
    """Made by ``proxy``. ``address`` is what to connect to, ``link`` the target's cable."""

    def __init__(
        self,
        door: socket.socket,
        link: Link,
        target: Callable[[], Awaitable[Address]],
        path_of: Callable[[Address], Awaitable[Path]],
    ) -> None:
        self.link = link
        host, port = door.getsockname()
        self.address: Address = (host, port)
        self._door = door
        self._target = target
        self._path_of = path_of

    async def serve(self) -> None:
        """Until cancelled, which resets what is still connected."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as connections:
            while True:
                near, peer = await loop.sock_accept(self._door)
                near.setblocking(False)
                connections.create_task(self._connect(near, peer))

    async def _connect(self, near: socket.socket, peer: Address) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            tune(far)
            path = await self._path_of(peer)
            with contextlib.ExitStack() as links:
                for link in path.links:
                    links.enter_context(link.carrying(connection))
                await _shake_hands(path)
                await asyncio.get_running_loop().sock_connect(far, await self._target())
                await carry(near, far, path)
        except OSError:
            pass  # nobody listens there: whoever dialled sees it below
        finally:
            for end in (near, far):  # again, after ``carry`` has closed them, does nothing
                if end.fileno() >= 0:
                    close(end, reset=True)


async def _shake_hands(path: Path) -> None:
    """The kernel has accepted already; over a real link the first byte would wait for one round trip."""
    for lanes in (path.forward, path.backward):
        await Line(lanes).let_pass(is_end=False)
        await asyncio.sleep(sum(lane.draw_delay() for lane in lanes))


@contextlib.asynccontextmanager
async def proxy(
    target: Address | Callable[[], Awaitable[Address]],
    link: Link | None = None,
    *,
    listen: Address = LOOPBACK,
    path_of: Callable[[Address], Awaitable[Path]] | None = None,
) -> AsyncIterator[Proxy]:
    """A proxy to ``target``, asked for anew for each connection when it is a function, while the block runs.

    ``path_of`` tells the lanes of a connection by the address it comes from; without it, all pass ``link`` alone.
    Leaving the block resets what is still connected. Raises OSError when ``listen`` can't be had.
    """
    cable = link or Link()
    where = target if callable(target) else _constant(target)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as door:
        tune(door)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(listen)
        door.listen()
        made = Proxy(door, cable, where, path_of or _always(Path.between(None, cable)))
        serving = asyncio.create_task(made.serve(), name=f"proxy at {made.address}")
        try:
            yield made
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            if not serving.cancelled():
                serving.result()  # it ended by itself: say why


def _constant(target: Address) -> Callable[[], Awaitable[Address]]:
    async def told() -> Address:
        return target

    return told


def _always(path: Path) -> Callable[[Address], Awaitable[Path]]:
    async def told(_peer: Address) -> Path:
        return path

    return told

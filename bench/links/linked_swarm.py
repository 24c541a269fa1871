"""A swarm on this machine whose nodes have a cable each.

    async with linked_swarm(model, [(0, 10), (10, 20), (20, 30)], folder) as swarm:
        swarm.shape(Shape(delay_seconds=0.01))  # 20 ms from any machine to any other, clients included
        swarm.nodes[1].link.cut()
        swarm.edge(swarm.nodes[0], swarm.nodes[2]).cut()  # these two lose sight of each other, nobody else
        spare = await swarm.add((10, 20))

A node listens on a port of loopback that it tells nobody and announces the proxy's. So whoever dials it passes its
link's ``down``; who that is the proxy learns from the kernel, and what is a node of the swarm passes its own ``up``
before. Streams of a pair use one connection, in both directions, whoever dialled. All clients share ``outside``.

Not shaped: what stays inside a machine (node, its libp2p daemon, its engine), and the time that a ``connect`` of TCP
itself takes: a link that is cut accepts, and says nothing. ``bypassing`` lists connections that pass no proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path as FilePath

from bench.links import owner
from bench.links.lane import Shape
from bench.links.link import Link
from bench.links.path import Path
from bench.links.proxy import Address, proxy
from dht.identity import Identity
from swarm.local_swarm import ADDRESS, READY, NodeProcess, postponed_signals

_OUTSIDE = -1


@dataclass(frozen=True, eq=False)
class LinkedNode:
    """``address`` is what others dial, with the peer id."""

    number: int
    span: tuple[int, int]
    process: NodeProcess
    link: Link
    address: str

    @property
    def pid(self) -> int:
        return self.process.process.pid

    @property
    def peer_id(self) -> str:
        return self.address.rpartition("/")[2]


class LinkedSwarm:
    """Made by ``linked_swarm``, used in the loop that made it. ``nodes`` are in the order of their start; those that
    were killed stay among them."""

    def __init__(
        self, model: FilePath, folder: FilePath, options: Sequence[str], module: str, stack: contextlib.AsyncExitStack
    ) -> None:
        self.nodes: list[LinkedNode] = []
        self.outside = Link()
        self._model = model
        self._folder = folder
        self._options = tuple(options)
        self._module = module
        self._stack = stack
        self._shape = Shape()
        self._edges: dict[tuple[int, int], Link] = {}

    @property
    def address(self) -> str:
        """Of the oldest node that still runs, to be given as initial peer."""
        return next(node.address for node in self.nodes if node.process.process.poll() is None)

    def shape(self, shape: Shape) -> None:
        """The shape of every cable, also of those to come and of the clients'."""
        self._shape = shape
        for link in (self.outside, *(node.link for node in self.nodes)):
            link.shape(shape)

    def edge(self, one: LinkedNode | None, other: LinkedNode | None) -> Link:
        """What only the connections between two nodes pass, beside both cables; None stands for all clients."""
        return self._edge(_number(one), _number(other))

    def partition(self, *groups: Sequence[LinkedNode]) -> None:
        """Nodes of different groups lose sight of each other; clients see all. ``heal`` ends it."""
        for one, other in combinations(groups, 2):
            for a, b in product(one, other):
                self.edge(a, b).cut()

    def heal(self) -> None:
        """Every cable and edge. Shapes stay."""
        for link in (self.outside, *(node.link for node in self.nodes), *self._edges.values()):
            link.heal()

    async def start(self, spans: Sequence[tuple[int, int]]) -> None:
        """All serve when this returns. Raises ``SwarmError`` when a node does not come up."""
        started = []
        for span in spans:
            started.append(await self._start(span, ()))
            if len(self.nodes) == 1:
                await asyncio.to_thread(started[0].process.wait_for, ADDRESS)
        for node in started:
            await asyncio.to_thread(node.process.wait_for, READY)

    async def add(self, span: tuple[int, int], options: Sequence[str] = ()) -> LinkedNode:
        """One more node, serving. Raises ``SwarmError`` when it does not come up, as when the peers that it is to join
        are stopped: ``options`` may name others (``--initial-peers``)."""
        node = await self._start(span, options)
        await asyncio.to_thread(node.process.wait_for, READY)
        return node

    def bypassing(self) -> list[tuple[Address, Address]]:
        """Connections of nodes whose other end is not in this process, where the proxies are."""
        ours = {(there, here) for here, there in owner.connections(os.getpid())}
        daemons = [owner.daemon_of(node.pid) for node in self.nodes]
        return [ends for pid in daemons if pid is not None for ends in owner.connections(pid) if ends not in ours]

    def stop(self) -> None:
        """Heals everything and asks all nodes to leave."""
        self.heal()
        for node in self.nodes:
            node.process.stop()

    async def _start(self, span: tuple[int, int], options: Sequence[str]) -> LinkedNode:
        number = len(self.nodes)
        link = Link(self._shape)
        key = self._folder / f"node{number}.key"
        with Identity.load_or_create(key) as identity:
            peer_id = identity.peer_id
        made = await self._stack.enter_async_context(
            proxy(lambda: self._target(number), link, path_of=lambda peer: self._path(peer, made.address, number))
        )
        announced = "/ip4/{}/tcp/{}".format(*made.address)
        arguments = ["--model", str(self._model), "--layers", "{}:{}".format(*span), "--listen", "127.0.0.1:0"]
        arguments += ["--announce-maddrs", announced, "--identity", str(key)]
        arguments += ["--initial-peers", self.address] if self.nodes else ["--new-swarm"]
        arguments += [*self._options, *options]
        with postponed_signals():
            process = NodeProcess(arguments, self._folder / f"node{number}.log", module=self._module)
            self._stack.push_async_callback(asyncio.to_thread, process.join)
        self.nodes.append(LinkedNode(number, span, process, link, f"{announced}/p2p/{peer_id}"))
        return self.nodes[number]

    async def _target(self, number: int) -> Address:
        return await asyncio.to_thread(_door_of, self.nodes[number].pid)

    async def _path(self, peer: Address, door: Address, number: int) -> Path:
        """Of a connection from ``peer`` to a node. Raises ConnectionError when it is closed already."""
        origin = await asyncio.to_thread(self._origin, peer, door)
        cable = self.outside if origin is None else origin.link
        turned = origin is not None and origin.number > number
        return Path.between(cable, self.nodes[number].link).over(self._edge(_number(origin), number), turned=turned)

    def _origin(self, peer: Address, door: Address) -> LinkedNode | None:
        inode = owner.socket_inode(peer, door)
        if inode is None:
            raise ConnectionResetError
        for node in tuple(self.nodes):
            daemon = owner.daemon_of(node.pid)
            if daemon is not None and owner.holds_socket(daemon, inode):
                return node
        return None

    def _edge(self, one: int, other: int) -> Link:
        return self._edges.setdefault((min(one, other), max(one, other)), Link())


def _number(node: LinkedNode | None) -> int:
    return _OUTSIDE if node is None else node.number


def _door_of(node_pid: int) -> Address:
    daemon = owner.daemon_of(node_pid)
    port = None if daemon is None else owner.listening_port(daemon)
    if port is None:
        raise ConnectionRefusedError
    return "127.0.0.1", port


@contextlib.asynccontextmanager
async def linked_swarm(
    model: FilePath,
    spans: Sequence[tuple[int, int]],
    folder: FilePath,
    options: Sequence[str] = (),
    *,
    module: str = "swarm.node.cli",
) -> AsyncIterator[LinkedSwarm]:
    """One node per span behind a link each until the block ends; logs and keys go to ``folder``.

    ``module`` is what runs instead of the node's command line. Raises ``SwarmError`` when a node does not come up. All
    nodes are gone afterwards; what is cut is healed for their leaving.
    """
    async with contextlib.AsyncExitStack() as stack:
        swarm = LinkedSwarm(model, folder, options, module, stack)
        try:
            await swarm.start(spans)
            yield swarm
        finally:
            swarm.stop()

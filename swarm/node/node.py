"""A node, from the model file to a clean leave. Used by the command line and, in process, by tests and tools."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from dht.record import NodeState, SpanRecord
from shim.build import library_path
from swarm.artifact import Manifest, available_memory
from swarm.errors import first_error
from swarm.node.arrival import Arrival
from swarm.node.config import NodeConfig
from swarm.node.intent import check, intent
from swarm.node.neighbours import Neighbours, round_trip
from swarm.node.network import Network, join
from swarm.node.own_digests import OwnDigests
from swarm.node.own_record import make_record
from swarm.node.parts import Parts
from swarm.node.plan import Plan, Planner
from swarm.node.relocation import Relocation
from swarm.node.replicas import Replicas
from swarm.node.reporter import Reporter, Silent
from swarm.node.service import Doors, Service
from swarm.node.serving import Home, Serving
from swarm.node.sessions import Counts
from swarm.node.shared import Shared
from swarm.node.stored_parts import open_parts
from swarm.node.translate import as_swarm_error
from swarm.placement.moving import Mover

if TYPE_CHECKING:
    from dht.peer import Peer
    from swarm.node.metrics_page import MetricsPage

LOAD_SECONDS = 10.0  # between two records that differ in the queue alone


class SwarmNode:
    """Serves one span while used as a context manager.

    Everything runs in one task of its own, so that entering and leaving may happen in different tasks. Entering raises
    ``SwarmError`` when the node can't serve, and cancelling it undoes what was begun. Leaving ends running sessions;
    ``drain`` first lets them finish. ``wait`` returns when the node has ended by itself.
    """

    def __init__(self, config: NodeConfig, reporter: Reporter | None = None) -> None:
        self.config = config
        self._reporter = reporter or Silent()
        self._main: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._network: Network | None = None
        self._home: Home | None = None
        self._serving: Serving | None = None
        self._relocating: asyncio.Task[None] | None = None
        self._doors = Doors()
        self._metrics: MetricsPage | None = None

    # --- what can be asked of a serving node

    @property
    def peer_id(self) -> str:
        return self._on_network.peer.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs, to be given to others as initial peers."""
        return self._on_network.addresses

    @property
    def manifest(self) -> Manifest:
        return self._on_network.manifest

    @property
    def shared(self) -> Shared:
        """Sessions, engine and counters."""
        return self.serving.shared

    @property
    def service(self) -> Service:
        return self.serving.service

    @property
    def serving(self) -> Serving:
        """Another one after each move."""
        assert self._serving is not None, "the node is not serving"
        return self._serving

    @property
    def span(self) -> tuple[int, int]:
        return self.shared.span

    @property
    def state(self) -> NodeState:
        return self.shared.state

    @property
    def peer(self) -> Peer:
        return self._on_network.peer

    @property
    def metrics_url(self) -> str:
        assert self._metrics is not None, "metrics are off"
        return self._metrics.url

    def counts(self) -> Counts:
        return self.shared.table.counts()

    async def records(self) -> tuple[SpanRecord, ...]:
        """What the swarm knows of this artifact, asked now."""
        return await self._on_network.records()

    # --- life

    async def __aenter__(self) -> SwarmNode:
        self._main = asyncio.create_task(self._live(), name="swarm node")
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait([self._main, ready], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._end()
            raise
        finally:
            ready.cancel()
        if self._main.done():
            await self._main
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        assert self._main is not None
        await self._main

    async def wait(self) -> None:
        """Returns or raises when the node has ended, which only an error of its own makes it do."""
        assert self._main is not None
        await asyncio.shield(self._main)

    async def drain(self) -> None:
        """Takes no new sessions, and returns when the running ones have ended or the time for it is over."""
        if self._relocating is not None:
            self._relocating.cancel()
            await asyncio.wait({self._relocating})
        await self.serving.drain(self.config.timeouts.drain_seconds)

    async def _end(self) -> None:
        assert self._main is not None
        self._main.cancel()
        await asyncio.wait([self._main])

    @property
    def _on_network(self) -> Network:
        assert self._network is not None, "the node is not serving"
        return self._network

    # --- from the files to the swarm, and back

    async def _live(self) -> None:
        with as_swarm_error(), first_of_group():
            async with AsyncExitStack() as stack:
                self._metrics = await self._listen_for_metrics(stack)
                parts = await open_parts(stack, self.config.model, self._reporter)
                planner = Planner(parts.manifest, self.config.model, available_memory(), parts)
                plan = planner.explicit()
                if plan is None:
                    planner.choose((), "")  # raises at once when nothing would ever fit
                else:
                    self._show(plan, parts)
                library_path()  # before minutes are spent on joining, fetching and loading
                self._network = await join(stack, self.config.network, parts.manifest)
                await self._show_other_models(self._network)
                mover = None
                if plan is None:
                    plan, mover = await self._choose(self._network, planner, parts)
                self._reporter.joined(self.addresses)
                plan = await while_connected(self._network, self._arrival(planner, parts).reach(plan, mover))
                await self._serve(plan, planner, parts, mover)

    async def _listen_for_metrics(self, stack: AsyncExitStack) -> MetricsPage | None:
        if self.config.metrics is None:
            return None
        from swarm.node.metrics_page import MetricsPage  # only those who want it pay for aiohttp

        page = await stack.enter_async_context(MetricsPage(self.config.metrics))
        self._reporter.line(f"metrics: {page.url}")
        return page

    def _show(self, plan: Plan, parts: Parts) -> None:
        for line in intent(plan, parts):
            self._reporter.line(line)
        check(plan, parts)

    async def _show_other_models(self, network: Network) -> None:
        """An address of another swarm is easily mistaken for the right one."""
        others = () if network.is_alone else await network.other_models()
        if others:
            ours = network.manifest.name
            self._reporter.line(
                f"this swarm serves {', '.join(others)}, and nobody in it {ours} yet; to help with theirs start with "
                "--model NAME instead"
            )

    async def _choose(self, network: Network, planner: Planner, parts: Parts) -> tuple[Plan, Mover]:
        rules = self.config.moves
        if not network.is_alone:
            await asyncio.sleep(rules.join_delay_seconds * random.random())
        plan = planner.choose(await network.records(), network.peer_id, parts.held_spans())
        self._show(plan, parts)
        return plan, Mover(planner.place(plan.contexts, network.peer_id), rules)

    def _arrival(self, planner: Planner, parts: Parts) -> Arrival:
        public_name = self.config.network.public_name
        return Arrival(
            self._on_network, planner, parts, self._reporter, public_name, lambda plan: self._show(plan, parts)
        )

    async def _serve(self, plan: Plan, planner: Planner, parts: Parts, mover: Mover | None) -> None:
        network = self._on_network
        async with asyncio.TaskGroup() as tasks:
            digests = OwnDigests(parts.manifest, parts.digest)
            self._home = Home(self.config, parts.manifest, parts.folder, network.peer, tasks, self._reporter, digests)
            helpers = [tasks.create_task(network.watch())]
            try:
                await self._doors.open(network.peer)
                await self.serve(plan)
                relocation = Relocation(
                    stage=self,
                    network=network,
                    parts=parts,
                    planner=planner,
                    reporter=self._reporter,
                    show=lambda plan: self._show(plan, parts),
                    drain_seconds=self.config.timeouts.drain_seconds,
                    look_seconds=self.config.look_seconds,
                )
                self._relocating = tasks.create_task(relocation.run(mover))
                helpers += [self._relocating, tasks.create_task(self._tell_load())]
                replicas = Replicas(self, network, self._reporter, parts.right_digests, self.config.look_seconds)
                helpers.append(tasks.create_task(replicas.run()))
                if self.config.measure_speed:
                    helpers.append(tasks.create_task(self._neighbours(network).run()))
                self._ready.set()
                await self._stop.wait()
            finally:
                for helper in helpers:
                    helper.cancel()
                await self._leave(helpers)

    def _neighbours(self, network: Network) -> Neighbours:
        ask = partial(round_trip, network.peer)
        seconds = self.config.timeouts.links_seconds
        return Neighbours(network.peer_id, network.records, lambda: self.shared, ask, seconds)

    async def _leave(self, helpers: Sequence[asyncio.Task[None]]) -> None:
        if self._serving is not None:
            self._serving.shared.on_change = lambda: None  # from here on nothing is announced any more
        await self._on_network.announcer.withdraw()
        await asyncio.wait(helpers)  # one of them may be about to serve other layers
        if self._serving is not None:
            await self._serving.close()

    # --- as ``Relocation`` needs it

    async def serve(self, plan: Plan) -> None:
        """Loads the plan's layers and opens the doors to them. What was served before has been closed."""
        assert self._home is not None, "the node is not serving"
        self._serving = serving = Serving(self._home, plan)
        self._doors.service = serving.service
        self._show_metrics(serving.shared)
        await serving.begin(self._tell)
        await self._publish()
        await serving.load()
        await self._publish()

    async def _publish(self) -> None:
        await self._on_network.announcer.publish(self._record())

    def _show_metrics(self, shared: Shared) -> None:
        if self._metrics is not None:
            from swarm.node.metrics import registry_of

            self._metrics.registry = registry_of(shared, self.peer_id)

    def _tell(self) -> None:
        """The announcer sees to it that many changes make few messages."""
        self._on_network.announcer.update(self._record())

    async def _tell_load(self) -> None:
        """The queue changes without any event that is worth a message, and so does what is unused."""
        seconds = min(LOAD_SECONDS, self.config.timeouts.idle_seconds / 2)
        while True:
            await asyncio.sleep(seconds)
            self.shared.end_unused()
            self._tell()

    def _record(self) -> SpanRecord:
        return make_record(self.shared, self.peer_id, self.addresses)


async def while_connected(network: Network, doing: Coroutine[None, None, Plan]) -> Plan:
    """Raises NetworkError as soon as the libp2p daemon has ended: fetching may take hours in which nobody would hear of
    this node."""
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(network.watch())
        plan = await doing
        watching.cancel()
    return plan


@contextmanager
def first_of_group() -> Iterator[None]:
    """Task groups wrap what their block raises; the caller wants the error itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise first_error(group) from None

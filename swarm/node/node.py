"""A node, from the model file to a clean leave. Used by the command line and, in process, by tests and tools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import platformdirs

from dht.addresses import announceable
from dht.record import MAX_TEXT, NodeState, SpanRecord
from shim.build import library_path
from shim.errors import EngineDied
from shim.types import EngineConfig
from swarm.artifact import Manifest, available_memory
from swarm.artifact.catalog import LocalModel, open_model
from swarm.errors import NetworkError
from swarm.node.config import NodeConfig
from swarm.node.engine_host import EngineHost
from swarm.node.executor import Executor
from swarm.node.identity import own_identity
from swarm.node.journal import JournalStore
from swarm.node.live import Job
from swarm.node.measure import measure_speed
from swarm.node.own_record import make_record
from swarm.node.plan import Plan, Planner
from swarm.node.reporter import Reporter, Silent
from swarm.node.scheduler import Policy, Runner
from swarm.node.service import Service
from swarm.node.sessions import Counts, SessionTable
from swarm.node.shared import Shared
from swarm.node.slots import chunk_within_stall
from swarm.node.tally import Tally
from swarm.node.translate import as_swarm_error
from swarm.protocol import clean_text

if TYPE_CHECKING:
    from dht.announcer import Announcer
    from dht.peer import Peer
    from dht.view import SwarmView
    from swarm.node.metrics_page import MetricsPage

logger = logging.getLogger(__name__)

LOAD_SECONDS = 10.0  # between two records that differ in the queue alone


@dataclass(frozen=True)
class _Network:
    peer: Peer
    view: SwarmView
    announcer: Announcer
    addresses: tuple[str, ...]


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
        self._network: _Network | None = None
        self._service: Service | None = None
        self._manifest: Manifest | None = None
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
        assert self._manifest is not None, "the node is not serving"
        return self._manifest

    @property
    def shared(self) -> Shared:
        """Sessions, engine and counters."""
        return self.service.shared

    @property
    def service(self) -> Service:
        assert self._service is not None, "the node is not serving"
        return self._service

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
        manifest = self.manifest
        view = self._on_network.view
        snapshot = await view.refresh(manifest.artifact_id, manifest.n_layers, manifest.cuts)
        return snapshot.records

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
        seconds = self.config.timeouts.drain_seconds
        self.shared.drain(seconds)
        lives = self.shared.lives
        if lives:
            self._reporter.line(f"draining: waiting up to {seconds:g} s for {_running(len(lives))}")
        try:
            async with asyncio.timeout(seconds):
                while lives:
                    await self.shared.session_ended()
                    self._reporter.line(f"draining: {_running(len(lives))} left")
        except TimeoutError:
            logger.warning("%d sessions still run and are ended", len(lives))

    async def _end(self) -> None:
        assert self._main is not None
        self._main.cancel()
        await asyncio.wait([self._main])

    @property
    def _on_network(self) -> _Network:
        assert self._network is not None, "the node is not serving"
        return self._network

    def _set_state(self, state: NodeState) -> None:
        self.shared.state = state
        self._tell()

    # --- from the file to the swarm, and back

    async def _live(self) -> None:
        with as_swarm_error(), first_of_group():
            async with AsyncExitStack() as stack:
                self._metrics = await self._listen_for_metrics(stack)
                self._manifest = await self._open_model()
                planner = Planner(self._manifest, self.config.model, available_memory())
                plan = planner.explicit()
                if plan is not None:
                    self._show(plan)
                library_path()  # before minutes are spent on joining and loading
                self._network = await self._join(stack, self._manifest)
                if plan is None:
                    plan = planner.choose(await self.records(), self.peer_id)
                    self._show(plan)
                self._reporter.joined(self.addresses)
                await self._serve(stack, plan)

    async def _listen_for_metrics(self, stack: AsyncExitStack) -> MetricsPage | None:
        if self.config.metrics is None:
            return None
        from swarm.node.metrics_page import MetricsPage  # only those who want it pay for aiohttp

        page = await stack.enter_async_context(MetricsPage(self.config.metrics))
        self._reporter.line(f"metrics: {page.url}")
        return page

    def _show_metrics(self, shared: Shared) -> None:
        if self._metrics is not None:
            from swarm.node.metrics import registry_of

            self._metrics.registry = registry_of(shared, self.peer_id)

    async def _open_model(self) -> Manifest:
        options = self.config.model
        cancelled = False

        def hashed(done: int, total: int) -> None:
            if cancelled:
                raise InterruptedError
            self._reporter.progress(f"hashing {options.path.name}", done / max(total, 1))

        try:
            copy = await asyncio.to_thread(open_model, LocalModel(options.path, options.name), hashed)
        finally:
            cancelled = True  # a thread can only be asked to stop
        for remark in copy.remarks:
            self._reporter.line(remark)
        return copy.manifest

    def _show(self, plan: Plan) -> None:
        """The sum comes before the verdict, and both before anything is loaded."""
        if plan.choice is not None:
            lines = plan.choice.explain()
            for line in lines if self.config.explain else lines[:1]:
                self._reporter.line(line)
        self._reporter.line(f"memory: {plan.describe()}")
        plan.check_fits()

    async def _join(self, stack: AsyncExitStack, manifest: Manifest) -> _Network:
        from dht import clock  # these import hivemind, which takes seconds
        from dht.announcer import Announcer
        from dht.peer import Peer
        from dht.view import SwarmView

        options = self.config.network
        identity = stack.enter_context(own_identity(options.identity_path, manifest.name, identity_folder()))
        peer = await Peer.start(
            identity, listen=options.listen, initial_peers=options.initial_peers, announce=options.announce
        )
        stack.push_async_callback(peer.close)
        await clock.check(peer)
        addresses = announceable(await peer.addresses())
        announcer = await stack.enter_async_context(Announcer(peer, identity, manifest.cuts))
        return _Network(peer, SwarmView(peer), announcer, addresses)

    async def _serve(self, stack: AsyncExitStack, plan: Plan) -> None:
        config = self.config
        host = EngineHost(self._engine_config(plan), config.timeouts, config.limits)
        stack.push_async_callback(host.close)
        tally = Tally()
        policy: Policy[Job] = Policy(plan.wanted_rows)  # each row of a shared call may be wanted
        async with (
            asyncio.TaskGroup() as tasks,
            Runner(policy, Executor(host, tally), config.calls_in_flight) as runner,
        ):
            shared = Shared(
                manifest=self.manifest,
                span=(plan.first, plan.last),
                host=host,
                table=SessionTable(plan.contexts, config.limits.sessions_per_peer),
                journals=JournalStore(
                    plan.memory.journal_bytes,
                    config.journal_folder or journal_folder(),
                    config.journal_disk_reserve_bytes,
                ),
                runner=runner,
                dialer=self.peer,
                tasks=tasks,
                limits=config.limits,
                timeouts=config.timeouts,
                chunk_tokens=plan.chunk_tokens,
                public_name=clean_text(config.network.public_name, MAX_TEXT),
                tally=tally,
            )
            self._service = Service(shared, config.model.path.parent)
            shared.on_change = self._tell
            self._show_metrics(shared)
            shared.say = self._reporter.line
            try:
                await self._open_doors(shared, plan)
                await self._until_stopped(shared, tasks)
            finally:
                shared.on_change = lambda: None  # from here on nothing is announced any more
                await self._on_network.announcer.withdraw()
                await self._service.close()
                await host.close()  # before the tasks are waited for: a hung engine would hold them for good

    def _engine_config(self, plan: Plan) -> EngineConfig:
        options = self.config.model
        return EngineConfig(
            model_path=options.path.parent / self.manifest.files[0].name,
            first=plan.first,
            last=plan.last,
            contexts=plan.contexts,
            threads=options.threads,
            chunk_tokens=plan.chunk_tokens,
            kv_type=options.kv_type,
            wanted_rows=plan.wanted_rows,
            load_mtp=options.mtp,
        )

    async def _open_doors(self, shared: Shared, plan: Plan) -> None:
        await self.service.start(self.peer)
        await self._publish()
        what = f"loading layers {plan.first}:{plan.last}"
        info = await shared.host.start(lambda fraction: self._reporter.progress(what, fraction))
        logger.info("loaded layers %d:%d, numerics %s", plan.first, plan.last, info.numerics_id)
        if self.config.measure_speed:
            shared.speed = await measure_speed(shared.host)
            logger.info("measured decode %.3g, prefill %.3g tokens/s", *astuple(shared.speed))
            if self.config.model.chunk_tokens is None:
                shared.chunk_tokens = chunk_within_stall(shared.speed.prefill_tokens_per_second, plan.chunk_tokens)
        shared.state = NodeState.ONLINE
        await self._publish()

    async def _until_stopped(self, shared: Shared, tasks: asyncio.TaskGroup) -> None:
        shared.host.on_lost = self._engine_lost
        shared.host.on_back = self._engine_back
        helpers = [
            tasks.create_task(shared.host.supervise()),
            tasks.create_task(self._tell_load()),
            tasks.create_task(self._watch_network()),
        ]
        self._ready.set()
        await self._stop.wait()
        for helper in helpers:
            helper.cancel()

    async def _watch_network(self) -> None:
        code = await asyncio.shield(self.peer.lost)
        raise NetworkError(f"the libp2p daemon ended with code {code}; start the node again")

    async def _publish(self) -> None:
        await self._on_network.announcer.publish(self._record())

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
        return make_record(self.shared, self.peer_id, self._on_network.addresses)

    def _engine_lost(self, died: EngineDied) -> None:
        self.service.engine_died(died)
        if self.state == NodeState.ONLINE:
            self._set_state(NodeState.JOINING)

    def _engine_back(self) -> None:
        if self.state == NodeState.JOINING:
            self._set_state(NodeState.ONLINE)


def _running(n_sessions: int) -> str:
    return f"{n_sessions or 'no'} running session{'' if n_sessions == 1 else 's'}"


def journal_folder() -> Path:
    return Path(platformdirs.user_cache_dir("glm-swarm")) / "journals"


def identity_folder() -> Path:
    return Path(platformdirs.user_data_dir("glm-swarm")) / "identities"


@contextmanager
def first_of_group() -> Iterator[None]:
    """Task groups wrap what their block raises; the caller wants the error itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None

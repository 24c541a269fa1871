"""One span in service: its engine, its sessions and what answers its peers, from the loading to the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from dht.record import MAX_TEXT, NodeState
from shim.errors import EngineDied
from shim.types import EngineConfig
from swarm.artifact import Manifest
from swarm.node.config import NodeConfig
from swarm.node.engine_host import EngineHost
from swarm.node.executor import Executor
from swarm.node.journal import JournalStore
from swarm.node.live import Job
from swarm.node.own_digests import OwnDigests
from swarm.node.plan import Plan
from swarm.node.reporter import Reporter
from swarm.node.scheduler import Policy, Runner
from swarm.node.service import Service
from swarm.node.sessions import SessionTable
from swarm.node.shared import Shared
from swarm.node.slots import chunk_within_stall
from swarm.node.tally import Tally
from swarm.node.upkeep import Upkeep
from swarm.protocol import clean_text
from swarm.protocol.questions import Dialer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Home:
    """What a node has whichever span it serves. ``folder`` holds the model's files, ``tasks`` outlive every span."""

    config: NodeConfig
    manifest: Manifest
    folder: Path
    dialer: Dialer
    tasks: asyncio.TaskGroup
    reporter: Reporter
    digests: OwnDigests


class Serving:
    """``begin`` it, ``load`` it, and ``close`` it in any case, each from any task.

    Before it is loaded its service answers that it is not ready. ``on_change`` is called when what is announced of it
    differs, until it is closed.
    """

    def __init__(self, home: Home, plan: Plan) -> None:
        self.plan = plan
        self._home = home
        config = home.config
        self.host = EngineHost(_engine_config(home, plan), config.timeouts, config.limits)
        tally = Tally()
        policy: Policy[Job] = Policy(plan.wanted_rows)  # each row of a shared call may be wanted
        self._runner = Runner(policy, Executor(self.host, tally), config.calls_in_flight)
        self.shared = Shared(
            manifest=home.manifest,
            span=(plan.first, plan.last),
            host=self.host,
            table=SessionTable(plan.contexts, config.limits.sessions_per_peer),
            journals=JournalStore(
                plan.memory.journal_bytes,
                config.journal_folder or journal_folder(),
                config.journal_disk_reserve_bytes,
            ),
            runner=self._runner,
            dialer=home.dialer,
            tasks=home.tasks,
            limits=config.limits,
            timeouts=config.timeouts,
            chunk_tokens=plan.chunk_tokens,
            public_name=clean_text(config.network.public_name, MAX_TEXT),
            tally=tally,
            digests=home.digests,
            say=home.reporter.line,
        )
        self.service = Service(self.shared, home.folder)
        self._upkeep = Upkeep(home, plan, self.shared)
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._helpers: list[asyncio.Task[None]] = []

    async def begin(self, on_change: Callable[[], None]) -> None:
        self.shared.on_change = on_change
        self._running = self._home.tasks.create_task(self._run(), name=f"serving {self._layers}")
        await self._begun.wait()

    async def load(self) -> None:
        """Raises EngineError, and NotEnoughMemory when weights can't be locked. Cancelling it ends the engine.
        Afterwards peers may open sessions."""
        shared, config = self.shared, self._home.config
        await self._upkeep.hold()
        what = f"loading layers {self._layers}"
        info = await self.host.start(lambda fraction: self._home.reporter.progress(what, fraction))
        logger.info("loaded layers %s, numerics %s", self._layers, info.numerics_id)
        self.host.on_lost, self.host.on_back = self._engine_lost, self._engine_back
        self._helpers.append(self._home.tasks.create_task(self.host.supervise()))
        await self._upkeep.compare()
        if config.measure_speed:
            await self._upkeep.find_speed()
            if config.model.chunk_tokens is None:
                shared.chunk_tokens = chunk_within_stall(shared.speed.prefill_tokens_per_second, shared.chunk_tokens)
        self._helpers.append(self._home.tasks.create_task(self._upkeep.run()))
        self._set_state(NodeState.ONLINE)

    async def drain(self, seconds: float) -> None:
        """Takes no new sessions, and returns when the running ones have ended or the time for it is over."""
        shared, say = self.shared, self._home.reporter.line
        shared.drain(seconds)
        lives = shared.lives
        if lives:
            say(f"draining: waiting up to {seconds:g} s for {_running(len(lives))}")
        try:
            async with asyncio.timeout(seconds):
                while lives:
                    await shared.session_ended()
                    say(f"draining: {_running(len(lives))} left")
        except TimeoutError:
            logger.warning("%d sessions still run and are ended", len(lives))

    async def close(self) -> None:
        """Ends the sessions that are left, and the engine. Idempotent."""
        self.shared.on_change = lambda: None
        for helper in self._helpers:
            helper.cancel()
        await self.service.close()
        await self._upkeep.close()
        await self.host.close()  # before the calls are waited for: a hung engine would hold them for good
        self._over.set()
        if self._begun.is_set():
            await asyncio.wait({self._running})

    @property
    def _layers(self) -> str:
        return f"{self.plan.first}:{self.plan.last}"

    async def _run(self) -> None:
        async with self._runner:
            self._begun.set()
            await self._over.wait()

    def _set_state(self, state: NodeState) -> None:
        self.shared.state = state
        self.shared.on_change()

    def _engine_lost(self, died: EngineDied) -> None:
        self.service.engine_died(died)
        if self.shared.state == NodeState.ONLINE:
            self._set_state(NodeState.JOINING)

    def _engine_back(self) -> None:
        if self.shared.state == NodeState.JOINING:
            self._set_state(NodeState.ONLINE)


def journal_folder() -> Path:
    return Path(platformdirs.user_cache_dir("glm-swarm")) / "journals"


def _engine_config(home: Home, plan: Plan) -> EngineConfig:
    options = home.config.model
    return EngineConfig(
        model_path=home.folder / home.manifest.files[0].name,
        first=plan.first,
        last=plan.last,
        contexts=plan.contexts,
        threads=options.threads,
        chunk_tokens=plan.chunk_tokens,
        kv_type=options.kv_type,
        wanted_rows=plan.wanted_rows,
        load_mtp=options.mtp,
    )


def _running(n_sessions: int) -> str:
    return f"{n_sessions or 'no'} running session{'' if n_sessions == 1 else 's'}"

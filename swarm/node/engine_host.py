"""Keeps an engine process running: starts it, notices its death, reports what was lost, starts it again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shim.errors import EngineDied, EngineError
from shim.process import EngineProcess
from shim.types import Bytes, EngineConfig, EngineInfo, Floats, KvRowBytes, StepBatch, StepResult, SummarySpec
from swarm.ids import SessionId
from swarm.node.config import Limits, Timeouts
from swarm.node.strikes import Strikes

logger = logging.getLogger(__name__)

LOOKS = 8  # at the calls, in the time that one may take
SLOWER = 10  # a call may be than all before
MOST = 5  # times the usual limit, for a machine that slept is no slow one


class EngineHost:
    """One engine, across any number of deaths of its process.

    ``supervise`` is to run as a task as long as the host is used, and ends an engine that hangs; ``close`` ends the
    child. ``on_lost`` is called when the engine died and every slot is empty, ``on_back`` when a new one serves.
    """

    def __init__(self, config: EngineConfig, timeouts: Timeouts, limits: Limits) -> None:
        self._config = config
        self._timeouts = timeouts
        self._engine: EngineProcess | None = None
        self._info: EngineInfo | None = None
        self._running: dict[object, tuple[SessionId, ...]] = {}  # calls in the order they were handed over
        self._judged: EngineProcess | None = None
        self._blamed: tuple[SessionId, ...] = ()
        self._answered = 0
        self._slowest_seconds = 0.0
        self._row_bytes: dict[int, KvRowBytes] = {}
        self.strikes = Strikes(limits.poison_strikes, limits.remembered_sessions)
        self.restarts = 0
        self.on_lost: Callable[[EngineDied], None] = lambda _died: None
        self.on_back: Callable[[], None] = lambda: None

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() first"
        return self._info

    @property
    def info_or_none(self) -> EngineInfo | None:
        """None before the first start is done."""
        return self._info

    @property
    def ready(self) -> bool:
        return self._engine is not None

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None while there is none."""
        return None if self._engine is None else self._engine.pid

    def blames(self, session: SessionId) -> bool:
        """Whether a step of it was in the engine that died last, at its death."""
        return session in self._blamed

    async def start(self, on_progress: Callable[[float], None] | None = None) -> EngineInfo:
        """The first start: its failure is the caller's. Cancelling ends the child."""
        self._engine = await EngineProcess.start(self._config, on_progress)
        self._info = self._engine.info
        return self._info

    async def supervise(self) -> None:
        """Never returns; cancel it."""
        while True:
            engine = self._engine
            assert engine is not None
            died = await self._death(engine)
            self._engine = None
            self._judge(engine)
            last = f"; its last words: {died.last_lines[-1]}" if died.last_lines else ""
            logger.error("the engine died (%s)%s; its sessions are lost and it is started again", died, last)
            self.on_lost(died)
            await engine.close()
            await self._restart()
            self.on_back()

    async def _death(self, engine: EngineProcess) -> EngineDied:
        """Waits for it, and brings it about when the oldest call takes too long: whoever waits for a hung engine can't
        know that it hangs, for the node itself answers. Looks are counted, so that a pause of this program is one."""
        standing, answered = 0, self._answered
        while not engine.died.done():
            usual = self._timeouts.engine_seconds
            seconds = min(max(usual, SLOWER * self._slowest_seconds), MOST * usual)
            await asyncio.wait({engine.died}, timeout=seconds / LOOKS)
            standing = standing + 1 if self._running and answered == self._answered else 0
            answered = self._answered
            if standing > LOOKS:  # the first may have been early
                engine.kill(f"it answered no call for {seconds:.3g} s")
                standing = 0
        return engine.died.result()

    async def _restart(self) -> None:
        pause = self._timeouts.restart_first_seconds
        while self._engine is None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._timeouts.restart_longest_seconds)
            try:
                self._engine = await EngineProcess.start(self._config)
            except EngineError as error:
                logger.error("the engine does not start (%s); trying again in %.1f s", error, pause)
        self.restarts += 1
        logger.info("the engine serves again")

    async def step(
        self, sessions: tuple[SessionId, ...], batch: StepBatch, summaries: Sequence[SummarySpec]
    ) -> tuple[StepResult, float]:
        """As ``EngineProcess.step``; ``sessions`` are the ones to blame when the engine dies of it."""
        with self._call(sessions) as engine:
            result, waited_seconds = await engine.step(batch, summaries)
        self._slowest_seconds = max(self._slowest_seconds, result.compute_seconds)
        return result, waited_seconds

    async def row(self, slot: int) -> Floats:
        with self._call() as engine:
            return await engine.row(slot)

    async def truncate(self, slot: int, position: int) -> None:
        with self._call() as engine:
            await engine.truncate(slot, position)

    async def position(self, slot: int) -> int:
        with self._call() as engine:
            return await engine.position(slot)

    async def kv_row_bytes(self, layer: int) -> KvRowBytes:
        """Raises BadStep for a layer outside the span."""
        if layer not in self._row_bytes:  # the engine is started again as it was
            with self._call() as engine:
                self._row_bytes[layer] = await engine.kv_row_bytes(layer)
        return self._row_bytes[layer]

    async def kv_read(self, slot: int, layer: int, first: int, count: int) -> Bytes:
        """As ``EngineProcess.kv_read``. The call is handed over before this first waits."""
        with self._call() as engine:
            return await engine.kv_read(slot, layer, first, count)

    async def kv_write(self, session: SessionId, slot: int, layer: int, first: int, rows: bytes) -> None:
        """As ``EngineProcess.kv_write``. ``session`` is the one to blame when the engine dies of it. The call is handed
        over before this first waits."""
        with self._call((session,)) as engine:
            await engine.kv_write(slot, layer, first, rows)

    async def kv_copy(self, source: int, target: int, layer: int, first: int, count: int) -> None:
        with self._call() as engine:
            await engine.kv_copy(source, target, layer, first, count)

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    @contextmanager
    def _call(self, sessions: tuple[SessionId, ...] = ()) -> Iterator[EngineProcess]:
        engine = self._engine
        if engine is None:
            raise EngineDied("the engine is being started again")
        call = object()
        self._running[call] = sessions
        try:
            yield engine
        except EngineDied:
            self._judge(engine)
            raise
        except EngineError:
            self._answered += 1
            raise
        else:
            self._answered += 1
        finally:
            del self._running[call]

    def _judge(self, engine: EngineProcess) -> None:
        """Called for each death by whoever hears of it first: afterwards the calls are gone."""
        if engine is not self._judged:
            self._judged = engine
            # calls queue in the pipe: only the oldest was running
            self._blamed = next(iter(self._running.values()), ())
            self.strikes.add(self._blamed)

"""One answer while hops die: what came, how long it took, and what was computed for it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bench.failover.contender import Contender
from bench.failover.herd import Member
from bench.failover.plan import Plan
from bench.failover.stage import Stage
from swarm.client.generate import Generation, GenerationOptions
from swarm.client.hop import HopPlace
from swarm.client.links import SessionTerms
from swarm.client.steps import StepAnswer, StepRequest, StepSession
from swarm.client.trace import RecoveryTrace
from swarm.errors import PeerFailed

FIRST_STEP_SECONDS = 0.02  # as long as nothing is known of a step's length
REMEMBERED_STEPS = 15


@dataclass(frozen=True)
class Strike:
    """A kill, ``moment`` on ``time.monotonic()``, in the step at ``position`` or, when that was quick, the next one."""

    hop: int
    peer_id: str
    position: int
    moment: float


@dataclass
class Answered:
    """``seconds`` from asking to the last token, without those in which the clock was stopped."""

    tokens: tuple[int, ...] = ()
    seconds: float = 0.0
    steps: int = 0  # decode steps begun, those taken again included
    begun: int = 0  # how often the prompt was sent
    strikes: list[Strike] = field(default_factory=list)
    recoveries: list[RecoveryTrace] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)  # by position of a step: when its answer came
    finished: bool = False  # no: it ran out of steps
    numerics_ids: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


class OutOfSteps(Exception):
    """The answer may take no more steps."""


class Clock:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._stopped = 0.0

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._stopped += time.monotonic() - began

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began - self._stopped


class Answering:
    """Of one prompt. Deaths come by ``plan`` at a drawn moment of a step; the clock stands while a node is started that
    makes the next death possible: on a swarm of many machines that would cost this answer nothing."""

    def __init__(self, stage: Stage, contender: Contender, plan: Plan, *, seed: int = 0, max_steps: int = 1 << 62):
        self.stage = stage
        self.done = Answered()
        self._contender = contender
        self._plan = plan
        self._random = random.Random(seed)
        self._max_steps = max_steps
        self._clock = Clock()
        self._timers: list[asyncio.TimerHandle] = []
        self._step_seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)

    async def answer(self, prompt: Sequence[int], n_tokens: int) -> Answered:
        """Greedy, whatever stop tokens come. Raises what the contender's sessions raise and it does not survive."""
        self._clock = Clock()
        try:
            while not self.done.finished:
                await self._attempt(prompt, n_tokens)
        except OutOfSteps:
            pass
        finally:
            for timer in self._timers:
                timer.cancel()
        self.done.seconds = self._clock.seconds
        return self.done

    async def _attempt(self, prompt: Sequence[int], n_tokens: int) -> None:
        async def opened() -> StepSession:
            return _Struck(self, await self._contender.open(len(prompt) + n_tokens), len(prompt))

        options = GenerationOptions(max_tokens=n_tokens)
        generation = Generation(prompt, options, self.stage.vocabulary, opened, self._contender.blame)
        self.done.begun += 1
        try:
            await generation.finish()
        except PeerFailed:
            if not self._contender.begins_again:
                raise
        else:
            self.done.finished = True
        finally:
            progress = generation.progress
            self.done.tokens = tuple(progress.token_ids)
            self.done.recoveries += progress.recoveries
            self.done.numerics_ids = progress.numerics_ids

    async def before_step(self, session: StepSession, token: int, position: int) -> None:
        if self.done.steps >= self._max_steps:
            raise OutOfSteps
        self.done.steps += 1
        hop = self._plan.hop(token)
        if hop is None:
            return
        place = session.places[hop % len(session.places)]
        with self._clock.stopped():
            await self._contender.ready(session, position)
            member = await self.stage.spare(place.peer_id)
            family = member.family() if member.lives else []  # else it died a moment ago, and nobody has noticed yet
        if family:
            usual = statistics.median(self._step_seconds) if self._step_seconds else FIRST_STEP_SECONDS
            delay = self._random.random() * usual
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(delay, self._strike, place, member, family, position))

    def after_step(self, position: int, seconds: float) -> None:
        self.done.ended[position] = time.monotonic()
        self._step_seconds.append(seconds)

    def _strike(self, place: HopPlace, member: Member, family: Sequence[int], position: int) -> None:
        if member.lives:
            self.done.strikes.append(Strike(place.index, place.peer_id, position, member.kill(family)))


class _Struck:
    """A session whose steps are watched. Everything else passes."""

    def __init__(self, answering: Answering, session: StepSession, n_prompt: int) -> None:
        self.terms: SessionTerms = session.terms
        self._answering = answering
        self._session = session
        self._n_prompt = n_prompt

    @property
    def places(self) -> tuple[HopPlace, ...]:
        return self._session.places

    @property
    def numerics_ids(self) -> tuple[str, ...]:
        return self._session.numerics_ids

    @property
    def tokens(self) -> tuple[int, ...]:
        return self._session.tokens

    @property
    def recoveries(self) -> Sequence[RecoveryTrace]:
        return self._session.recoveries

    async def send(self, request: StepRequest) -> int:
        return await self._session.send(request)

    async def answer(self, number: int) -> StepAnswer:
        return await self._session.answer(number)

    async def step(self, request: StepRequest) -> StepAnswer:
        await self._answering.before_step(self._session, request.start - self._n_prompt, request.start)
        began = time.monotonic()
        answer = await self._session.step(request)
        self._answering.after_step(request.start, time.monotonic() - began)
        return answer

    async def fetch_row(self, position: int) -> npt.NDArray[np.float32]:
        return await self._session.fetch_row(position)

    async def close(self) -> None:
        await self._session.close()

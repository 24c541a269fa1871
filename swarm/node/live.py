"""The moving parts of one session: steps come in, wait for the engine, and leave in order through the outbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shim.types import Ints, StepResult, SummarySpec
from swarm.node.batch import Rows, want_flags, wanted
from swarm.node.journal import Journal
from swarm.node.load import Load
from swarm.node.scheduler import Group, Runner, Work
from swarm.node.sessions import Session
from swarm.node.tally import Tally
from swarm.node.understudy import Understudy
from swarm.protocol import Activations, FrameStream, ReceivedStep, WireError, pb
from swarm.protocol.limits import MAX_DRAFTS

# A token and its drafts. The engine keeps room for the most rows of logits that were ever wanted at once: those of a
# whole chunk of the largest model would be 600 MB that no sum of memory holds.
MAX_WANTED_ROWS = MAX_DRAFTS + 1


@dataclass(frozen=True)
class Computed:
    """What the engine made of a step."""

    result: StepResult
    ipc_seconds: float
    batch_rows: int
    batch_sessions: int
    finished_us: int  # on the node's monotonic clock


@dataclass(frozen=True)
class Finished:
    """A step that leaves the hop: computed, or refused."""

    received: ReceivedStep
    outcome: Computed | WireError


@dataclass(frozen=True, eq=False)
class Job:
    """One accepted step on its way through the scheduler."""

    live: LiveSession
    received: ReceivedStep
    rows: Rows


class Watcher(Protocol):
    """Told at once, from within the session."""

    def changed(self) -> None:
        """More positions may stand, or the session has ended."""

    def rewritten(self, start: int) -> None:
        """What the session holds from ``start`` on is being replaced, or gone."""


class LiveSession:
    """Owned by the handler of the session's control stream. Nothing here awaits except ``take``, ``settle`` and
    ``ended``; cancelling them changes nothing."""

    def __init__(
        self,
        session: Session,
        runner: Runner[Job],
        shape: tuple[int, int, int],
        context: int,
        tally: Tally,
        load: Load,
        journal: Journal | None = None,
        understudy: Understudy | None = None,
    ) -> None:
        self.session = session
        self.understudy = understudy  # None for a hop that computes
        self.journal = journal  # of what the successor was given
        self.outbox: asyncio.Queue[Finished] = asyncio.Queue()
        self.ended: asyncio.Future[WireError | None] = asyncio.get_running_loop().create_future()
        self.data: FrameStream | None = None  # from the predecessor
        self.tally = tally
        self._runner = runner
        self._n_layers, self._n_embd, self._n_vocab = shape
        self._context = context
        self._load = load
        self._in_flight = 0  # accepted and not passed on
        self._computing: list[int] = []  # first positions of the jobs in the engine
        self._watchers: list[Watcher] = []
        self._replay_seconds = 0.0  # inside engine calls for replayed steps, not told yet
        self._changed = asyncio.Event()
        self._used = time.monotonic()

    @property
    def closed(self) -> bool:
        return self.ended.done()

    @property
    def is_exit(self) -> bool:
        return self.session.terms.run[1] == self._n_layers

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def idle_since(self) -> float | None:
        """``time.monotonic()`` when it was used last; None while steps are under way."""
        return None if self._in_flight else self._used

    def touch(self) -> None:
        """The session is of use to its client just now."""
        self._used = time.monotonic()

    @property
    def standing(self) -> int:
        """Positions below it are computed, and not being computed again."""
        return min((self.session.position, *self._computing))

    def close(self, reason: WireError | None) -> None:
        self._drop()
        if self.journal is not None:
            self.journal.close()
        self.ended.set_result(reason)
        self._tell_changed()

    @contextmanager
    def watched_by(self, watcher: Watcher) -> Iterator[None]:
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    async def take(self, received: ReceivedStep) -> None:
        """Queues one step from the predecessor; waits while too many are in flight. A late step has no effect."""
        step = received.step
        while not self.closed and not self._has_room(step.n_tokens):
            await self._change()
        if self.closed or self._is_late(step):
            return
        self._in_flight += 1
        try:
            rows = self._rows(step, received.activations)
            self.session.accept(step.step, step.start, step.n_tokens)
        except WireError as refusal:
            self.tally.failures["refused_steps"] += 1
            self.outbox.put_nowait(Finished(received, refusal))
        else:
            self._submit(Job(self, received, rows))

    def _has_room(self, n_tokens: int) -> bool:
        if self._in_flight >= self._load.steps_of_session:
            return False
        return self._load.admits(self.session.owner, n_tokens, self._changed)

    def _is_late(self, step: pb.Step) -> bool:
        late = self.session.is_stale(step.epoch, step.step)
        if late or step.epoch > self.session.epoch:
            self.tally.failures["stale_steps" if late else "early_steps"] += 1
            return True
        return False

    def _submit(self, job: Job) -> None:
        run = self.session.terms.run
        self._load.add(self.session.owner, job.rows.count)
        self._runner.submit(
            Work(
                session=self.session.id,
                peer=self.session.owner,
                group=Group(self._context, *run),
                rows=job.rows.count,
                chunk=job.rows.tiled,
                job=job,
                suspect=self.session.suspect,
            )
        )

    def begin(self, job: Job) -> None:
        """The job is handed to the engine now."""
        self._computing.append(job.rows.start)
        self._tell_rewritten(job.rows.start)

    def finish(self, job: Job, outcome: Computed | WireError) -> None:
        """The engine's verdict. Dropped when the session ended meanwhile."""
        self._load.remove(self.session.owner, job.rows.count)
        self._computing.remove(job.rows.start)
        if self.closed:
            self._changed.set()
            return
        session = self.session
        if isinstance(outcome, WireError):
            session.lost(outcome.position)
            self._tell_rewritten(outcome.position)
            if self.journal is not None:
                self.journal.truncate(outcome.position)
        else:
            session.computed(job.rows.start + job.rows.count)
            if job.received.step.replay:
                self._replay_seconds += outcome.result.compute_seconds
            else:
                session.suspect = False  # what its client waits for has passed
            if self.journal is not None and outcome.result.hidden is not None:
                self.journal.record(job.rows.start, outcome.result.hidden, chunk=job.rows.tiled)
            if session.last_step == job.received.step.step and wanted(job.rows):
                session.last_row = session.position - 1
        self.outbox.put_nowait(Finished(job.received, outcome))
        self._tell_changed()

    def take_replay_seconds(self) -> float:
        """Inside engine calls for replayed steps since this was last asked."""
        seconds, self._replay_seconds = self._replay_seconds, 0.0
        return seconds

    def passed_on(self) -> None:
        """A step left the outbox."""
        self._in_flight -= 1
        self.touch()
        self._changed.set()

    async def settle(self, keep_tokens: int) -> None:
        """Forgets the steps that wait, returns when the engine computes none of this session, and leaves it with
        ``keep_tokens`` at most. An understudy is an ordinary hop then."""
        self._in_flight -= self._drop()
        self.touch()
        self._changed.set()
        while self._computing and not self.closed:
            await self._change()
        if self.understudy is not None:
            async with self.understudy.turn():
                self.understudy.over = True
                self.understudy = None
        self.session.rewind(keep_tokens)
        self._tell_rewritten(self.session.position)
        if self.journal is not None:
            self.journal.truncate(self.session.position)

    def covers(self, first: int) -> bool:
        """Whether the journal can feed a successor from ``first`` to what the session holds."""
        position = self.session.position
        return first >= position if self.journal is None else self.journal.covers(first, position)

    def _drop(self) -> int:
        """Forgets the steps that wait for the engine; returns their number."""
        dropped = self._runner.drop(self.session.id)
        for work in dropped:
            self._load.remove(self.session.owner, work.rows)
        return len(dropped)

    def _tell_changed(self) -> None:
        self._changed.set()
        for watcher in self._watchers:
            watcher.changed()

    def _tell_rewritten(self, start: int) -> None:
        for watcher in self._watchers:
            watcher.rewritten(start)

    @property
    def journal_first(self) -> int:
        """The earliest start that the journal can push from; what the session holds when it can't push."""
        position = self.session.position
        if self.journal is None or not self.journal.covers(self.journal.first, position):
            return position
        return min(position, self.journal.first)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _rows(self, step: pb.Step, hidden: Activations | None) -> Rows:
        first, last = self.session.terms.run
        tokens = None
        if first == 0:
            tokens, hidden = self._tokens(step), None
        elif hidden is None or hidden.shape[1] != self._n_embd:
            raise WireError(pb.MALFORMED, f"the hop takes hidden states of {self._n_embd} values")
        want = None
        if last == self._n_layers:
            self._check_ids("output.ids", step.output.ids)
            if step.output.all_rows and step.n_tokens > MAX_WANTED_ROWS:
                raise WireError(pb.TOO_LARGE, f"logits of {step.n_tokens} rows, at most {MAX_WANTED_ROWS} at once")
            want = want_flags(step.n_tokens, all_rows=step.output.all_rows, last_row=step.output.last_row)
        return Rows(
            run=(first, last),
            slot=self.session.slot,
            start=step.start,
            count=step.n_tokens,
            tokens=tokens,
            hidden=hidden,
            want=want,
            summary=_summary(step.output, self._n_vocab),
            tiled=step.kind == pb.PREFILL,
        )

    def _tokens(self, step: pb.Step) -> Ints:
        if len(step.tokens) != step.n_tokens:
            raise WireError(pb.MALFORMED, f"{len(step.tokens)} tokens for {step.n_tokens} rows at the entry")
        self._check_ids("tokens", step.tokens)
        return np.array(step.tokens, np.int32)

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self._n_vocab:
            raise WireError(pb.MALFORMED, f"{name} holds {max(ids)}, the vocabulary has {self._n_vocab}")


def _summary(output: pb.OutputRequest, n_vocab: int) -> SummarySpec:
    temperature = output.temperature if output.temperature > 0 else 1.0
    return SummarySpec(temperature, min(output.top, n_vocab), tuple(output.ids))

"""Runs one cell of the fault matrix: a greedy and a sampled answer at once, struck at the same place."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise

from bench.faults.cell import Cell, Place
from bench.faults.fault import Fault, injected
from bench.faults.moment import Moment
from bench.faults.side_door import node_door
from bench.faults.stage import N_TOKENS, PROMPT, SAMPLINGS, Stage
from bench.links import Shape
from bench.links.linked_swarm import LinkedNode
from swarm.client import Generation
from swarm.client.trace import RecoveryTrace

CELL_SECONDS = 150.0
N_SESSIONS = len(SAMPLINGS)
SLOW = Shape(delay_seconds=0.05, jitter_seconds=0.02, bytes_per_second=128e3)
JOURNAL_LOST = "journal can't be kept"  # in the log of the node
# whose replacement is being replayed to when a hop is struck in a recovery; at the exit it is the replacement itself
RECOVERING = {Place.ENTRY: Place.MIDDLE, Place.MIDDLE: Place.EXIT, Place.EXIT: Place.EXIT}
# by which the client loses the very hop that is struck
LOSSES = (Fault.KILL_NODE, Fault.KILL_ENGINE, Fault.STOP_NODE, Fault.LINK_CUT, Fault.LINK_RESET)


@dataclass(frozen=True)
class Outcome:
    """Of a cell that held what is promised. By answer, the greedy one first."""

    pauses: tuple[float, ...]  # the longest wait for a token from the strike on, in seconds
    recoveries: tuple[int, ...]
    seconds: float  # the whole cell


class _Answers:
    """Both, until they are complete; ``struck`` notes the time from which waits count."""

    def __init__(self, generations: list[Generation]) -> None:
        self.generations = generations
        self._tokens: list[list[float]] = [[] for _ in generations]  # when they came
        self._struck = 0.0

    def begin(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        return [group.create_task(self._follow(*pair)) for pair in zip(self.generations, self._tokens, strict=True)]

    async def _follow(self, generation: Generation, times: list[float]) -> None:
        async for _ in generation:
            times.append(time.monotonic())

    def struck(self) -> None:
        self._struck = time.monotonic()

    @property
    def pauses(self) -> tuple[float, ...]:
        waited = ([self._struck, *(at for at in times if at > self._struck)] for times in self._tokens)
        return tuple(max(later - earlier for earlier, later in pairwise(times)) for times in waited)

    @property
    def recoveries(self) -> list[list[RecoveryTrace]]:
        return [generation.progress.recoveries for generation in self.generations]


async def run_cell(cell: Cell, stage: Stage) -> Outcome:
    """Raises AssertionError with what was different from an undisturbed answer or left in a node, and the session's
    error when it was lost. The stage is fit for the next cell in any case."""
    began = time.monotonic()
    assert not cell.senseless, cell.senseless
    await stage.make_whole()
    try:
        async with asyncio.timeout(CELL_SECONDS):
            answers = await _struck(cell, stage)
            await stage.settled()
    except BaseException:
        await stage.clean()
        raise
    recoveries = tuple(len(some) for some in answers.recoveries)
    return Outcome(answers.pauses, recoveries, time.monotonic() - began)


async def _struck(cell: Cell, stage: Stage) -> _Answers:
    chain = stage.chain()
    answers = _Answers(await stage.generations())
    recovering = cell.moment is Moment.IN_RECOVERY
    first = RECOVERING[cell.place] if recovering else cell.place
    moment = Moment.MID_DECODE if recovering else cell.moment
    await node_door(chain[first]).hold_at(moment.position(len(PROMPT), N_TOKENS), N_SESSIONS)
    async with asyncio.TaskGroup() as group:
        running = answers.begin(group)
        await node_door(chain[first]).held()
        stage.admit_all()
        if recovering:
            chain[first] = await _recovering(stage, chain[first])
        answers.struck()
        async with injected(cell.fault, stage.swarm, chain[cell.place], slow=SLOW, sessions=N_SESSIONS):
            if cell.fault is Fault.JOURNAL_DISK_FULL:
                await _lose_successor(cell.place, stage, chain, answers)
            elif cell.fault not in (Fault.KILL_NODE, Fault.STOP_NODE) or chain[first] is not chain[cell.place]:
                await node_door(chain[first]).release()
            await asyncio.wait(running)
    await stage.release_all()
    _check(cell, chain[cell.place], stage, answers)
    return answers


async def _recovering(stage: Stage, lost: LinkedNode) -> LinkedNode:
    """Who takes the place of ``lost``, and holds what is replayed to it."""
    heir = stage.other(lost)
    await node_door(heir).hold_at(0, N_SESSIONS)
    async with injected(Fault.LINK_RESET, stage.swarm, lost):
        await node_door(lost).release()
    await node_door(heir).held()
    return heir


async def _lose_successor(place: Place, stage: Stage, chain: list[LinkedNode], answers: _Answers) -> None:
    """A while after its predecessor's journal was lost, for that is no loss until somebody needs it. Nobody is held
    afterwards."""
    node, successor = chain[place], chain[place + 1]
    before = node.process.text().count(JOURNAL_LOST)
    await node_door(successor).hold_at(len(PROMPT) + N_TOKENS * 3 // 4, N_SESSIONS)
    await node_door(node).release()
    await node_door(successor).held()
    assert node.process.text().count(JOURNAL_LOST) >= before + N_SESSIONS, "a journal was kept on a full disk"
    answers.struck()
    async with injected(Fault.LINK_RESET, stage.swarm, successor):
        await node_door(successor).release()


def _check(cell: Cell, struck: LinkedNode, stage: Stage, answers: _Answers) -> None:
    tokens = [generation.progress.token_ids for generation in answers.generations]
    assert tokens == stage.expected, f"{tokens} instead of {stage.expected}"
    recovering = cell.moment is Moment.IN_RECOVERY
    for recoveries in answers.recoveries:
        told = "; ".join(map(str, recoveries)) or "no recovery"
        if not cell.interrupts:
            assert len(recoveries) == recovering, told
        elif cell.fault is Fault.JOURNAL_DISK_FULL:
            assert len(recoveries) == 1 + recovering, told
        else:
            assert sum(len(one.story) for one in recoveries) >= 1 + recovering, told
        if cell.fault in LOSSES:
            assert struck.peer_id in {peer for one in recoveries for peer, _ in one.lost}, told

"""Sessions that compute nothing: they give way to others, and their clients come back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shim.types import ContextSpec
from swarm.client.lasting import LastingSession
from swarm.client.steps import StepRequest, WantedRow
from swarm.node.config import NodeConfig
from swarm.node.node import SwarmNode
from swarm.node.sessions import Counts
from swarm.node.unused import unused
from swarm.protocol import CONTROL_STREAM, pb
from tests.node.clients import patient_client
from tests.node.harness import CONTEXT, Session, client_peer, config, hang_up, hear, say, session, until

IDLE_SECONDS = 2.0
PROMPT = tuple((7 * at + at * at) % 250 for at in range(20))
NEXT = (11, 12, 13, 14)


def one_slot(model: Path, layers: str, folder: Path, peers: Sequence[str] = (), **timeouts: float) -> NodeConfig:
    made = config(model, layers, folder, peers, **timeouts)
    return replace(made, model=replace(made.model, contexts=(ContextSpec(1, CONTEXT),)))


@dataclass
class Used:
    idle_since: float | None


def test_the_longest_unused_goes_first_and_one_that_computes_never() -> None:
    old, older, busy, new = Used(50.0), Used(10.0), Used(None), Used(99.0)
    assert unused([old, busy, older, new], 40, 100.0) == [older, old]
    assert unused([], 40, 100.0) == []


async def prefill(session: LastingSession) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    await session.step(StepRequest(0, PROMPT[:16], pb.PREFILL))
    await session.step(StepRequest(16, PROMPT[16:], pb.PREFILL, WantedRow()))
    return await session.fetch_row(len(PROMPT) - 1)


async def decode(session: LastingSession, index: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    start = len(PROMPT) + index
    await session.step(StepRequest(start, NEXT[index : index + 1], pb.DECODE, WantedRow()))
    return await session.fetch_row(start)


async def test_an_unused_session_gives_way_and_goes_on_afterwards(llama_untied_path: Path, tmp_path: Path) -> None:
    async with (
        SwarmNode(one_slot(llama_untied_path, "0:3", tmp_path, idle_seconds=IDLE_SECONDS)) as entry,
        SwarmNode(one_slot(llama_untied_path, "3:6", tmp_path, entry.addresses, idle_seconds=IDLE_SECONDS)) as last,
    ):
        said: list[str] = []
        async with patient_client(entry, tmp_path, said) as first, patient_client(entry, tmp_path, []) as second:
            async with await first.open_session(CONTEXT) as undisturbed:
                expected = [await prefill(undisturbed), *[await decode(undisturbed, index) for index in range(4)]]
            async with await first.open_session(CONTEXT) as session:
                rows = [await prefill(session), await decode(session, 0)]
                async with await second.open_session(CONTEXT) as other:  # waits until the first is unused
                    assert [node.shared.tally.unused["slot_needed"] for node in (entry, last)] == [1, 1]
                    await prefill(other)
                    said.clear()
                    returning = asyncio.create_task(decode(session, 1))
                    while not any("waiting" in line for line in said):
                        assert not returning.done()
                        await decode(other, 0)  # its second time replaces the first
                rows += [await returning, await decode(session, 2), await decode(session, 3)]
                (recovery,) = session.recoveries
        assert all((mine == theirs).all() for mine, theirs in zip(rows, expected, strict=True))
        assert any("it computed nothing for" in what and "needed its slot" in what for what in recovery.story)
        assert first._avoided.now() == frozenset()
        await until(lambda: entry.counts() == last.counts() == Counts())


async def test_nobody_keeps_a_slot_for_ever(llama_untied_path: Path, tmp_path: Path) -> None:
    made = one_slot(llama_untied_path, "0:6", tmp_path, idle_seconds=0.1, longest_idle_seconds=0.3)
    async with SwarmNode(made) as node, client_peer(node) as peer:
        control = await say(peer, node, CONTROL_STREAM)
        await control.send(Session(peer, (node,)).opening(0))
        assert isinstance(await hear(control), pb.Opened)
        said = await hear(control)
        assert isinstance(said, pb.Error)
        assert said.code == pb.UNKNOWN_SESSION
        assert "it computed nothing for" in said.message
        assert (node.counts(), node.shared.tally.unused["too_long"]) == (Counts(), 1)
        await hang_up()


async def test_a_session_with_a_step_under_way_is_in_use(llama_untied_path: Path, tmp_path: Path) -> None:
    made = one_slot(llama_untied_path, "0:6", tmp_path, idle_seconds=0.05, longest_idle_seconds=1e6)
    async with SwarmNode(made) as node, client_peer(node) as peer, session(peer, node) as busy:
        pid = node.shared.host.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            assert busy.data is not None
            await busy.data.send_step(busy.step(0, PROMPT[:16]))
            (live,) = node.shared.lives.values()
            await until(lambda: live.in_flight == 1)
            since = time.monotonic()
            await until(lambda: time.monotonic() - since > 2 * made.timeouts.idle_seconds)
            assert [slots.free for slots in node.shared.slots()] == [0]
            refusal = await opening(Session(peer, (node,)), node)
            assert isinstance(refusal, pb.Error)
            assert refusal.code == pb.NODE_FULL
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: live.in_flight == 0)
        await until(lambda: [slots.free for slots in node.shared.slots()] == [1])
        assert isinstance(await opening(Session(peer, (node,)), node), pb.Opened)
        await hang_up()


async def opening(wanted: Session, node: SwarmNode) -> object:
    control = await say(wanted.peer, node, CONTROL_STREAM)
    await control.send(wanted.opening(0))
    return await hear(control)


async def test_a_session_too_small_does_not_give_way(llama_untied_path: Path, tmp_path: Path) -> None:
    made = one_slot(llama_untied_path, "0:6", tmp_path, idle_seconds=90)
    slots = (ContextSpec(1, CONTEXT), ContextSpec(1, 2 * CONTEXT))
    made = replace(made, model=replace(made.model, contexts=slots))
    async with SwarmNode(made) as node, client_peer(node) as peer, session(peer, node) as small:
        (live,) = node.shared.lives.values()
        live._used -= 100
        large = Session(peer, (node,))
        control = await say(peer, node, CONTROL_STREAM)
        asked = large.opening(0)
        asked.context_tokens = 2 * CONTEXT
        await control.send(asked)
        assert isinstance(await hear(control), pb.Opened)
        other = await say(peer, node, CONTROL_STREAM)
        asked.session_id = os.urandom(16)
        await until(lambda: len(node.shared.lives) == 2)
        for lasting in node.shared.lives.values():
            lasting.touch()
        live._used -= 100
        await other.send(asked)
        refusal = await hear(other)
        assert isinstance(refusal, pb.Error)
        assert refusal.code == pb.NODE_FULL
        assert small.id in node.shared.lives
        await hang_up()

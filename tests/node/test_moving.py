"""A node that chose its layers by itself takes others when the swarm needs it there, and nobody loses a session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dht.record import NodeState
from shim.errors import ModelError
from swarm import ClientConfig, SwarmClient
from swarm.client import LastingSession
from swarm.errors import SourceError
from swarm.node.config import NodeConfig
from swarm.node.engine_host import EngineHost
from swarm.node.explain import explain
from swarm.node.node import SwarmNode
from swarm.node.parts import WholeFiles
from swarm.node.plan import Plan, Planner
from swarm.node.reporter import Reporter, Silent
from swarm.node.sessions import Counts
from swarm.placement.choice import Choice, choose_span
from swarm.placement.moving import Mover, MoveRules
from swarm.placement.turns import Turns
from tests.e2e.chains import Script, unsplit_logits
from tests.node.harness import CHUNK, CONTEXT, SLOTS, config, until

SOON = MoveRules(
    join_delay_seconds=0.0,
    second_look_seconds=0.1,
    recheck_seconds=0.2,
    turns=Turns(turn_seconds=1.0, settle_seconds=0.0),
    patience_seconds=0.0,
    repair_step_seconds=0.5,
)
HALVES = ((0, 3), (3, 6))


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def auto(model: Path, folder: Path, peers: Sequence[str]) -> NodeConfig:
    """For a machine on which three of the six layers fit."""
    made = config(model, "auto", folder, peers, drain_seconds=20.0)
    return replace(made, moves=SOON, look_seconds=0.1)


@asynccontextmanager
async def of_two_halves(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[SwarmNode, SwarmNode, SwarmNode, Lines]]:
    """Three nodes: two that stay where they were told to be, and one that has chosen the second half."""
    monkeypatch.setattr(Planner, "budget_bytes", property(_half_of_the_model))
    lines = Lines()
    async with (
        SwarmNode(config(model, "0:3", folder, drain_seconds=20.0)) as first,
        SwarmNode(auto(model, folder, first.addresses), lines) as mover,
        SwarmNode(config(model, "3:6", folder, first.addresses)) as second,
    ):
        assert mover.span == (3, 6)
        yield first, second, mover, lines


def _half_of_the_model(planner: Planner) -> int:
    if planner.options.layers != "auto":
        return 4 << 30
    return max(planner._memory(*half, SLOTS).total_bytes for half in HALVES)


async def steps(session: LastingSession, script: Script, at: int, stop: int) -> list[bytes]:
    rows = []
    for request in script.requests[at:stop]:
        await session.step(request)
        rows.append((await session.fetch_row(request.start + len(request.tokens) - 1)).tobytes())
    return rows


async def test_a_node_takes_the_layers_of_one_that_leaves_and_sessions_go_on(
    llama_untied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script.random(256, 20, 8, CHUNK)
    expected = [row.tobytes() for row in unsplit_logits(llama_untied_path, script, context_tokens=CONTEXT)]
    n_steps = len(script.requests)
    async with of_two_halves(llama_untied_path, tmp_path, monkeypatch) as (first, second, mover, lines):
        own_config = ClientConfig(cache_dir=tmp_path / "cache")
        async with (
            SwarmClient.connect(list(first.addresses), own_config) as client,
            await client.open_session(CONTEXT) as session,
        ):
            rows = await steps(session, script, 0, n_steps // 2)
            peer_id, served = mover.peer_id, mover.serving
            leaving = asyncio.create_task(first.drain())
            await until(lambda: mover.span == (0, 3) and mover.state is NodeState.ONLINE)
            assert mover.peer_id == peer_id and mover.serving is not served
            assert served.host.pid is None, "its memory was given back"
            rows += await steps(session, script, n_steps // 2, n_steps)
            assert rows == expected
        await asyncio.wait_for(leaving, 20)
        await until(partial(_has_nothing, mover))
        assert "moving from layers 3:6 to 0:3" in lines.lines
        assert "serving layers 0:3" in lines.lines
        known = {record.peer_id: (record.first, record.last) for record in await second.records()}
        assert known[mover.peer_id] == (0, 3)


def _has_nothing(node: SwarmNode) -> bool:
    return node.counts() == Counts() and node.shared.copies == 0


async def test_layers_that_cannot_be_loaded_leave_the_old_ones_in_service(
    llama_untied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with of_two_halves(llama_untied_path, tmp_path, monkeypatch) as (first, _second, mover, lines):
        start, look = EngineHost.start, Mover.look
        n_broken = n_looks = 0

        async def broken(host: EngineHost, on_progress: object = None) -> object:
            nonlocal n_broken
            if host._config.first == 0:
                n_broken += 1
                raise ModelError("the disk is broken")
            return await start(host)

        def counted(*given: Any) -> Choice | None:
            nonlocal n_looks
            n_looks += 1
            return look(*given)

        monkeypatch.setattr(EngineHost, "start", broken)
        monkeypatch.setattr(Mover, "look", counted)
        await first.drain()
        await until(lambda: "serving layers 3:6" in lines.lines)
        assert lines.lines[-4:] == [
            "moving from layers 3:6 to 0:3",
            "layers 0:3 can't be served: the engine can't load the model: the disk is broken; download it again",
            "going back to layers 3:6",
            "serving layers 3:6",
        ]
        assert (mover.span, mover.state) == ((3, 6), NodeState.ONLINE)
        n_looks = 0
        await until(lambda: n_looks >= 5)
        assert n_broken == 1, "what could not be loaded is not tried again"


async def test_a_node_that_moves_can_leave_at_any_moment(
    llama_untied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with of_two_halves(llama_untied_path, tmp_path, monkeypatch) as (first, second, mover, _lines):
        begun = asyncio.Event()

        async def endless(_host: EngineHost, _on_progress: object = None) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(EngineHost, "start", endless)
        await first.drain()
        await asyncio.wait_for(begun.wait(), 20)
        await asyncio.wait_for(mover.drain(), 5)
        mover._stop.set()
        await asyncio.wait_for(mover.wait(), 10)
        await until(partial(_is_unknown, second, mover.peer_id))


async def _is_unknown(node: SwarmNode, peer_id: str) -> bool:
    return all(record.peer_id != peer_id for record in await node.records())


async def test_the_operator_hears_when_the_swarm_becomes_incomplete_and_complete(
    llama_untied_path: Path, tmp_path: Path
) -> None:
    lines = Lines()
    kept = replace(config(llama_untied_path, "0:3", tmp_path), look_seconds=0.1)
    async with SwarmNode(kept, lines) as node:
        async with SwarmNode(config(llama_untied_path, "3:6", tmp_path, node.addresses)):
            await until(lambda: bool(_of_the_swarm(lines)))
        await until(lambda: len(_of_the_swarm(lines)) == 2)
    assert _of_the_swarm(lines) == [
        "the swarm is complete: every layer of llama-untied is served",
        "the swarm is incomplete: nobody serves layers 3:6 any more; start a node for them",
    ]


def _of_the_swarm(lines: Lines) -> list[str]:
    return [line for line in lines.lines if line.startswith("the swarm is")]


async def test_a_move_whose_parts_cannot_be_had_is_tried_again_later(
    llama_untied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    async def get(_parts: WholeFiles, plan: Plan, _reporter: Reporter) -> None:
        if plan.span == (0, 3):
            tries.append(time.monotonic())
            if len(tries) <= 3:
                raise SourceError("the server is down")

    async with of_two_halves(llama_untied_path, tmp_path, monkeypatch) as (first, _second, _mover, lines):
        monkeypatch.setattr(WholeFiles, "get", get)
        await first.drain()
        await until(lambda: "serving layers 0:3" in lines.lines)
        off = "the move to layers 0:3 is off, 3:6 are served on: the server is down"
        assert lines.lines.count(off) == 3
        pauses = [later - earlier for earlier, later in pairwise(tries)]
        assert all(pause > 0.9 * SOON.recheck_seconds * 2**number for number, pause in enumerate(pauses, 1))


async def test_the_operator_hears_why_a_move_is_off(
    llama_untied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get(_parts: WholeFiles, plan: Plan, _reporter: Reporter) -> None:
        if plan.choice is not None:  # of the node that chose by itself
            await asyncio.Event().wait()

    async with of_two_halves(llama_untied_path, tmp_path, monkeypatch) as (first, second, mover, lines):
        monkeypatch.setattr(WholeFiles, "get", get)
        await first.drain()
        await until(lambda: any(line.startswith("chosen: layers 0:3") for line in lines.lines))
        monkeypatch.setattr(mover.serving.shared, "state", NodeState.JOINING)
        await until(lambda: any("is off" in line for line in lines.lines))
        why = "the engine has ended and is started again"
        assert [line for line in lines.lines if "is off" in line] == [
            f"the move to layers 0:3 is off, 3:6 are served on: {why}"
        ]
        monkeypatch.setattr(mover.serving.shared, "state", NodeState.ONLINE)
        async with SwarmNode(config(llama_untied_path, "0:3", tmp_path, second.addresses)):
            await until(lambda: any(line.endswith("the swarm has changed") for line in lines.lines))
            await until(lambda: "the swarm is complete: every layer of llama-untied is served" in lines.lines)
        assert (mover.span, mover.state) == ((3, 6), NodeState.ONLINE)


async def test_a_look_from_outside_shows_what_a_start_would_choose(
    llama_untied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own layers are not somebody else's, and ties are broken by who the node is."""
    async with of_two_halves(llama_untied_path, tmp_path, monkeypatch) as (first, second, _mover, _lines):
        key = second.config.network.identity_path
        assert key is not None
        for peers in (first.addresses, second.addresses):
            lines = Lines()
            asking = auto(llama_untied_path, tmp_path, peers)
            await explain(replace(asking, network=replace(asking.network, identity_path=key)), lines)
            assert lines.lines[0].startswith("chosen: layers ")
            chosen = choose_span(
                second.manifest.cuts,
                await second.records(),
                _half_of_the_model(Planner(second.manifest, asking.model, 0)),
                Planner(second.manifest, asking.model, 0).place(SLOTS, "").cost,
                artifact_id=second.manifest.artifact_id,
                peer_id=second.peer_id,
            )
            assert f"layers {chosen.first}:{chosen.last}:" in lines.lines[0]

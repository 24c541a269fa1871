"""A hop's state is copied to another node while the session goes on, and that node takes its place, bit by bit."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dht.peer import Peer
from shim.types import Bytes, ContextSpec
from swarm.ids import SessionId
from swarm.node.live import LiveSession
from swarm.node.node import SwarmNode
from swarm.node.sessions import Counts
from swarm.protocol import CONTROL_STREAM, DATA_STREAM, pb
from swarm.protocol.limits import STATE_BLOCK_TOKENS
from tests.node.copying import bits, decode, prefill, reroute, understudy
from tests.node.harness import CHUNK, client_peer, config, hang_up, hear, say, session, slots_empty, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 2 * STATE_BLOCK_TOKENS + 200
PROMPT = [7 * index % 256 for index in range(STATE_BLOCK_TOKENS + 50)]
MORE = [3, 141, 59, 26]

Swarm = tuple[SwarmNode, SwarmNode, SwarmNode]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nodes(llama_untied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    """The entry, the exit, and one that holds the layers of both."""
    folder = tmp_path_factory.mktemp("understudy")

    def node(layers: str, *peers: str) -> SwarmNode:
        made = config(llama_untied_path, layers, folder, peers)
        contexts = (ContextSpec(4, LONG),)
        return SwarmNode(replace(made, model=replace(made.model, contexts=contexts)))

    async with node("0:3") as entry, node("3:6", *entry.addresses) as last, node("0:6", *entry.addresses) as wide:
        yield entry, last, wide


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(nodes: Swarm) -> AsyncIterator[Peer]:
    async with client_peer(*nodes) as peer:
        yield peer


@pytest_asyncio.fixture(loop_scope="module")
async def swarm(nodes: Swarm) -> AsyncIterator[Swarm]:
    """Afterwards nothing may be left of what the test did."""
    yield nodes
    await hang_up()
    for node in nodes:
        await until(partial(nothing_is_left, node))
        await until(partial(slots_empty, node))


def nothing_is_left(node: SwarmNode) -> bool:
    shared, journals = node.shared, node.shared.journals
    return (
        node.counts() == Counts()
        and node.service.open_streams == shared.queue == shared.copies == 0
        and journals.n_open == journals.used_bytes == journals.spilled_bytes == 0
    )


async def undisturbed(client: Peer, swarm: Swarm, more: list[int]) -> list[list[pb.RowSummary]]:
    async with session(client, *swarm[:2], context_tokens=LONG) as mine:
        return bits([await prefill(mine, PROMPT), *await decode(mine, len(PROMPT), more)])


@pytest.mark.parametrize("of", [0, 1])
async def test_an_understudy_goes_on_with_the_same_bits(swarm: Swarm, client: Peer, of: int) -> None:
    expected = await undisturbed(client, swarm, MORE)
    async with session(client, *swarm[:2], keep_journal=True, context_tokens=LONG) as mine:
        second = await understudy(mine, swarm[2], of)
        await second.copy()
        answers = [await prefill(mine, PROMPT)]
        assert (await second.copied(STATE_BLOCK_TOKENS)).position == STATE_BLOCK_TOKENS
        answers += await decode(mine, len(PROMPT), MORE[:2])
        held = len(PROMPT) + 2
        await second.copy(held)
        copied = await second.copied(held, done=True)
        assert (copied.position, copied.failure) == (held, "")
        assert copied.journal_first == (0 if of == 0 else held), "the exit feeds nobody"
        rerouted = await second.takes_over(held)
        assert rerouted.position == held
        answers += await decode(mine, held, MORE[2:])
        assert bits(answers) == expected


async def test_its_journal_feeds_a_new_successor(swarm: Swarm, client: Peer) -> None:
    expected = await undisturbed(client, swarm, MORE)
    async with session(client, *swarm[:2], keep_journal=True, context_tokens=LONG) as mine:
        second = await understudy(mine, swarm[2], 0)
        answers = [await prefill(mine, PROMPT), *await decode(mine, len(PROMPT), MORE[:2])]
        held = len(PROMPT) + 2
        await second.copy(held)
        await second.copied(held, done=True)
        await second.takes_over(held)
        await mine.control[1].close()
        await until(lambda: not swarm[1].shared.lives)
        mine.control[1] = await say(client, swarm[1], CONTROL_STREAM)
        await mine.control[1].send(mine.opening(1))
        assert isinstance(await hear(mine.control[1]), pb.Opened)
        rerouted = await reroute(mine, held)
        assert [one.position for one in rerouted] == [held, 0]
        answers += await decode(mine, held, MORE[2:])
        assert bits(answers) == expected


async def test_a_part_of_the_run_is_copied(swarm: Swarm, client: Peer) -> None:
    """The chain is cut anew: the entry computes its first layer again, the understudy has the other two."""
    entry, last, wide = swarm
    expected = await undisturbed(client, swarm, MORE)
    async with session(client, entry, last, keep_journal=True, context_tokens=LONG) as mine:
        second = await understudy(mine, wide, 0, run=(1, 3))
        answers = [await prefill(mine, PROMPT), *await decode(mine, len(PROMPT), MORE[:2])]
        held = len(PROMPT) + 2
        await second.copy(held)
        assert (await second.copied(held, done=True)).journal_first == 0
        await mine.control[0].close()
        await until(lambda: not entry.shared.lives)
        mine.nodes, mine.control = (entry, wide, last), [mine.control[0], second.control, mine.control[1]]
        opening = mine.opening(0)
        opening.run.last, opening.successor_position = 1, held
        opening.epoch = 2
        mine.control[0] = await say(client, entry, CONTROL_STREAM)
        await mine.control[0].send(opening)
        assert isinstance(await hear(mine.control[0]), pb.Opened)
        await reroute(mine, held, first=1)
        assert mine.data is not None
        for start in range(0, len(PROMPT), CHUNK):
            await mine.data.send_step(mine.step(start, PROMPT[start : start + CHUNK], kind=pb.PREFILL, replay=True))
        await mine.data.send_step(mine.step(len(PROMPT), MORE[:2], kind=pb.DECODE, replay=True))
        answers += await decode(mine, held, MORE[2:])
        assert bits(answers) == expected


@pytest.mark.parametrize(
    ("hold_at", "firsts"), [(2, [0, 0, 0, 0, 0, 512, 512, 512]), (5, [0, 0, 0, 512, 512, 160, 160, 160, 512, 512, 512])]
)
async def test_what_is_computed_anew_while_it_is_copied_is_copied_anew(
    swarm: Swarm, client: Peer, monkeypatch: pytest.MonkeyPatch, hold_at: int, firsts: list[int]
) -> None:
    """The session goes back by 400 tokens while a layer of the first block, or of the second one, is read."""
    entry = swarm[0]
    back, other = 160, [11 * index % 256 for index in range(len(PROMPT) - 160)]
    async with session(client, *swarm[:2], keep_journal=True, context_tokens=LONG) as mine:
        await prefill(mine, PROMPT)
        await prefill(mine, other, start=back)
        expected = bits(await decode(mine, len(PROMPT), MORE))
        await prefill(mine, PROMPT)
        gate = ReadGate(entry, hold_at)
        monkeypatch.setattr(entry.shared.host, "kv_read", gate.read)
        second = await understudy(mine, swarm[2], 0)
        await second.copy(len(PROMPT))
        await gate.waits.wait()
        await prefill(mine, other, start=back)
        gate.opened.set()
        await second.copied(len(PROMPT), done=True)
        assert gate.firsts == firsts, "each layer of a block is read after the last change below its end"
        await second.takes_over(len(PROMPT))
        assert bits(await decode(mine, len(PROMPT), MORE)) == expected


class ReadGate:
    """Reads of a node's engine; the one with the number ``hold_at`` is answered when the gate is opened."""

    def __init__(self, node: SwarmNode, hold_at: int) -> None:
        self._read = node.shared.host.kv_read
        self._hold_at = hold_at
        self.firsts: list[int] = []
        self.waits, self.opened = asyncio.Event(), asyncio.Event()

    async def read(self, slot: int, layer: int, first: int, count: int) -> Bytes:
        self.firsts.append(first)
        rows = await self._read(slot, layer, first, count)
        if len(self.firsts) == self._hold_at:
            self.waits.set()
            await self.opened.wait()
        return rows


async def test_a_session_that_goes_back_after_the_copy_is_copied_from_there(swarm: Swarm, client: Peer) -> None:
    """The last block was partial, and the copy had been done."""
    async with session(client, *swarm[:2], keep_journal=True, context_tokens=LONG) as mine:
        second = await understudy(mine, swarm[2], 0)
        await prefill(mine, PROMPT)
        await second.copy(len(PROMPT))
        await second.copied(len(PROMPT), done=True)
        back = len(PROMPT) - 10
        expected = bits(await decode(mine, back, MORE))
        await decode(mine, back, MORE[:2])
        await second.copy(back + 2, order=2)
        copied = await second.copied(back + 2, done=True)
        assert (copied.position, copied.order) == (back + 2, 2)
        await second.takes_over(back + 2)
        assert bits(await decode(mine, back + 2, MORE[2:])) == expected[2:]
        live = swarm[2].shared.lives[SessionId(mine.id)]
        assert live.journal_first == 0 and live.covers(0)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_the_session_does_the_understudy_has_the_same_rows(
    swarm: Swarm, client: Peer, seed: int
) -> None:
    """Chunks, rows, steps back and orders as they come, none of which waits for the copy."""
    rng = random.Random(seed)
    entry, last, wide = swarm
    async with session(client, entry, last, keep_journal=True, context_tokens=LONG) as mine:
        second = await understudy(mine, wide, 0)
        at = 0
        for turn in range(120):
            match rng.choices(["chunk", "row", "back", "order"], [12, 4, 2, 2])[0]:
                case "chunk" if at + CHUNK < LONG - 1:
                    await prefill(mine, [rng.randrange(256) for _ in range(CHUNK)], start=at)
                    at += CHUNK
                case "row":
                    await decode(mine, at, [rng.randrange(256)])
                    at += 1
                case "back":
                    at = rng.randrange(max(0, at - 300), at + 1)
                case "order":
                    await second.copy(rng.choice([0, at, at // 2, at + 5]), order=turn)
        await decode(mine, at, [5])
        await second.copy(at + 1, order=1000)
        while (copied := await second.copied(at + 1, done=True)).order != 1000:
            pass
        assert copied.journal_first == 0
        lives = [node.shared.lives[SessionId(mine.id)] for node in (entry, wide)]
        for layer in range(3):
            ours, theirs = [
                await node.shared.host.kv_read(live.session.slot, layer, 0, at + 1)
                for node, live in zip((entry, wide), lives, strict=True)
            ]
            assert ours.tobytes() == theirs.tobytes()
        assert pushes(lives[0]) == pushes(lives[1])


def pushes(live: LiveSession) -> list[tuple[int, bool, bytes]]:
    assert live.journal is not None
    return [(push.start, push.chunk, push.rows.tobytes()) for push in live.journal.pushes(0, CHUNK)]


async def test_a_dead_hop_is_followed_by_what_was_copied(swarm: Swarm, client: Peer) -> None:
    """Two layers have the second block, the third has not: what every layer has counts, the rest is computed."""
    entry, last, wide = swarm
    expected = await undisturbed(client, swarm, MORE)
    async with session(client, entry, last, keep_journal=True, context_tokens=LONG) as mine:
        second = await understudy(mine, wide, 0)
        await second.copy()
        answers = [await prefill(mine, PROMPT), *await decode(mine, len(PROMPT), MORE[:2])]
        held = len(PROMPT) + 2
        await second.copied(STATE_BLOCK_TOKENS)
        live = wide.shared.lives[SessionId(mine.id)]
        slot = entry.shared.lives[SessionId(mine.id)].session.slot
        for layer in (0, 1):
            rows = await entry.shared.host.kv_read(slot, layer, STATE_BLOCK_TOKENS, held - STATE_BLOCK_TOKENS)
            assert live.understudy is not None
            with live.understudy.writing(layer, STATE_BLOCK_TOKENS, held):
                await wide.shared.host.kv_write(
                    live.session.id, live.session.slot, layer, STATE_BLOCK_TOKENS, rows.tobytes()
                )
        assert (await second.takes_over(held)).position == STATE_BLOCK_TOKENS
        assert mine.data is not None
        rest = (PROMPT + MORE[:2])[STATE_BLOCK_TOKENS:held]
        for at in range(0, len(rest), CHUNK):
            part = rest[at : at + CHUNK]
            kind = pb.PREFILL if STATE_BLOCK_TOKENS + at + CHUNK <= len(PROMPT) else pb.DECODE
            if kind == pb.DECODE:
                chunk = len(PROMPT) - STATE_BLOCK_TOKENS - at
                await mine.data.send_step(
                    mine.step(STATE_BLOCK_TOKENS + at, part[:chunk], kind=pb.PREFILL, replay=True)
                )
                await mine.data.send_step(mine.step(len(PROMPT), part[chunk:], kind=pb.DECODE, replay=True))
                break
            await mine.data.send_step(mine.step(STATE_BLOCK_TOKENS + at, part, kind=kind, replay=True))
        answers += await decode(mine, held, MORE[2:])
        assert bits(answers) == expected


# --- what goes wrong


async def test_an_understudy_that_is_gone_is_told_and_costs_nothing_else(swarm: Swarm, client: Peer) -> None:
    async with session(client, *swarm[:2], context_tokens=LONG) as mine:
        second = await understudy(mine, swarm[2], 0)
        await second.copy()
        assert (await second.copied()).position == 0
        await second.control.close()
        copied = await second.copied(1)
        assert "refused: the session has ended" in copied.failure
        await until(lambda: swarm[0].shared.copies == 0)
        await mine.compute(0, PROMPT[:4])


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"understudy": pb.Neighbour(peer_id="12D3KooWnobody")}, "12D3KooWnobody"),
        ({"run": pb.Layers(first=2, last=5)}, "no part of the session's 0:3"),
    ],
    ids=["nobody", "layers"],
)
async def test_orders_that_can_not_be_followed(
    swarm: Swarm, client: Peer, change: dict[str, Any], failure: str
) -> None:
    async with session(client, *swarm[:2], context_tokens=LONG) as mine:
        second = await understudy(mine, swarm[2], 0)
        await second.copy(**change)
        assert failure in (await second.copied(1)).failure
        await second.copy()
        assert not (await second.copied()).failure


async def test_an_understudy_with_a_shorter_context_is_told_apart(swarm: Swarm, client: Peer) -> None:
    async with session(client, *swarm[:2], context_tokens=LONG) as mine:
        mine.context_tokens = 64
        second = await understudy(mine, swarm[2], 0)
        mine.context_tokens = LONG
        await mine.compute(0, PROMPT[:CHUNK], kind=pb.PREFILL)
        await second.copy(CHUNK)
        await second.copied(CHUNK, done=True)
        for start in range(CHUNK, 5 * CHUNK, CHUNK):
            await mine.compute(start, PROMPT[start : start + CHUNK], kind=pb.PREFILL)
        await second.copy(5 * CHUNK)
        assert "beyond the session's 64 tokens" in (await second.copied(5 * CHUNK)).failure


async def test_everything_ends_with_the_session_in_the_middle_of_a_copy(
    swarm: Swarm, client: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = ReadGate(swarm[0], hold_at=2)
    monkeypatch.setattr(swarm[0].shared.host, "kv_read", gate.read)
    async with session(client, *swarm[:2], context_tokens=LONG) as mine:
        second = await understudy(mine, swarm[2], 0)
        await prefill(mine, PROMPT)
        await second.copy(len(PROMPT))
        await gate.waits.wait()
        assert swarm[0].shared.copies == 1
        await mine.control[0].close()
        await until(partial(nothing_is_left, swarm[0]))
        assert swarm[2].shared.lives, "the understudy is its client's"
        gate.opened.set()
        assert len(gate.firsts) == 2, "the slot may be another's now"


async def test_an_engine_that_dies_takes_the_understudy_with_it(swarm: Swarm, client: Peer) -> None:
    wide = swarm[2]
    async with session(client, *swarm[:2], context_tokens=LONG) as mine:
        second = await understudy(mine, wide, 0)
        await mine.compute(0, PROMPT[:CHUNK], kind=pb.PREFILL)
        await second.copy(CHUNK)
        await second.copied(CHUNK, done=True)
        pid, restarts = wide.shared.host.pid, wide.shared.host.restarts
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert "the engine died" in (await second.copied(CHUNK + 1)).failure
        error = await hear(second.control)
        assert isinstance(error, pb.Error) and error.code == pb.ENGINE_LOST
        await until(lambda: wide.shared.host.restarts == restarts + 1)


async def test_an_understudy_takes_no_steps(swarm: Swarm, client: Peer) -> None:
    async with session(client, *swarm[:2], context_tokens=LONG) as mine:
        await understudy(mine, swarm[2], 0)
        data = await say(client, swarm[2], DATA_STREAM)
        await data.send(pb.Attach(session_id=mine.id, epoch=mine.epoch))
        error = await hear(data)
        assert isinstance(error, pb.Error) and error.code == pb.NOT_ALLOWED

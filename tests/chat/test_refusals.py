"""What the user of ``swarm-chat`` reads when a node won't do what a chat needs, and how the chat goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pexpect  # type: ignore[import-untyped]
import pytest
import pytest_asyncio

from dht.record import NodeState
from shim.build import cache_dir
from shim.types import ContextSpec
from swarm.chat.cli import main
from swarm.ids import PeerId
from swarm.node.config import Limits, PerMinute
from swarm.node.node import SwarmNode
from swarm.node.rates import Rate, Rates
from swarm.node.sessions import Counts
from swarm.protocol import WireError
from tests.node.clients import patient_client
from tests.node.harness import config, until

SLOTS = ContextSpec(2, 128)
HELLO = ("--greedy", "--max-tokens", "8", "-p", "Hello")
WILD = ("--temperature", "9", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "1", "--effort", "none")
IN_VAIN = ("--wait-seconds", "0")
PEER = r"peer 12D3Koo\w+ \(layers 0:8\)"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str

    def ended_with(self, code: int, text: str) -> bool:
        """After that one line about it, a pattern."""
        return self.code == code and re.fullmatch(f"swarm-chat: {text}\n", self.stderr) is not None


Chat = Callable[..., Awaitable[Done]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SwarmNode]:
    """All of glm-tiny, for two sessions."""
    made = config(glm_tiny, "0:8", tmp_path_factory.mktemp("node"))
    async with SwarmNode(replace(made, model=replace(made.model, contexts=(SLOTS,)))) as node:
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def node(served: SwarmNode) -> AsyncIterator[SwarmNode]:
    await until(lambda: announces(served, free=SLOTS.slots))
    yield served
    await until(lambda: served.counts() == Counts())


async def announces(node: SwarmNode, free: int) -> bool:
    records = await node.records()
    return [[slots.free for slots in record.slots if record.state == NodeState.ONLINE] for record in records] == [
        [free]
    ]


@pytest.fixture
def environment(served: SwarmNode, tmp_path: Path) -> dict[str, str]:
    folders = {f"XDG_{kind}_HOME": str(tmp_path / kind) for kind in ("STATE", "CONFIG")}
    return {**folders, "SWARM_PEERS": served.addresses[0]}


@pytest.fixture
def chat(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Runs the command in a thread, beside the node."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    async def run(*arguments: str) -> Done:
        return Done(await asyncio.to_thread(main, arguments), *capsys.readouterr())

    return run


@contextmanager
def used_up(node: SwarmNode, what: str, per_minute: int) -> Iterator[None]:
    """Others have just had all that the node gives in a minute. Its clock goes on by 0.05 s with each request."""
    before, clock = node.shared.rates, itertools.count()
    limits = cast(Limits, replace(cast(Any, Limits()), **{what: PerMinute(per_minute, per_minute)}))
    node.shared.rates = Rates.of(limits, lambda: next(clock) * 0.05)
    rate: Rate = getattr(node.shared.rates, what)
    with suppress(WireError):
        while True:
            rate.take(PeerId("others"))
    try:
        yield
    finally:
        node.shared.rates = before


@asynccontextmanager
async def every_slot_taken(node: SwarmNode, folder: Path) -> AsyncIterator[None]:
    async with patient_client(node, folder, []) as client, AsyncExitStack() as stack:
        for _ in range(SLOTS.slots):
            await stack.enter_async_context(await client.open_session(SLOTS.tokens))
        yield


async def test_a_node_without_a_free_slot(
    node: SwarmNode, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its record says so already or not."""
    announce = node.shared.on_change
    monkeypatch.setattr(node.shared, "on_change", lambda: None)
    async with every_slot_taken(node, tmp_path):
        done = await chat(*HELLO, *IN_VAIN)
        assert done.ended_with(
            8, rf"{PEER} has no free slot: no slot of \d+ tokens is free; try again in 2 s or add a node"
        ), done
        announce()
        await until(lambda: announces(node, free=0))
        done = await chat(*HELLO, *IN_VAIN)
        full = r"every peer that serves layers 0:8 is full; try again later, or start one: swarm-node .*"
        assert done.ended_with(7, full), done
    announce()


async def test_too_many_sessions_of_one_peer(node: SwarmNode, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.shared.table, "_per_peer", 0)
    why = "takes no more from this client: 0 sessions of one peer are open here, and it may have no more"
    done = await chat(*HELLO, "--wait-seconds", "0.1")
    assert done.ended_with(
        8,
        rf"waiting up to 0 s more: peer 12D3Ko…\w+ \(layers 0:8\) {why}\n"
        rf"swarm-chat: {PEER} {why}; close other sessions or try again in 2 s",
    ), done


async def test_too_many_sessions_a_minute(node: SwarmNode, chat: Chat) -> None:
    with used_up(node, "opens", 6):
        done = await chat(*HELLO, *IN_VAIN)
    why = r"takes no more from this client: sessions a minute: at most 6 for all peers, again in [\d.]+ s"
    assert done.ended_with(8, rf"{PEER} {why}; close other sessions or try again in \d+ s"), done


async def test_too_many_rows_a_minute_make_the_chat_wait(node: SwarmNode, chat: Chat) -> None:
    """It says so, and answers what it would have answered."""
    ask = (*WILD, "--max-tokens", "12", "--json", "-p", "Hello")
    expected = json.loads((await chat(*ask)).stdout)
    assert expected["full_rows_fetched"] >= 3
    with used_up(node, "rows", 600):
        done = await chat(*ask)
    answer = json.loads(done.stdout)
    assert (answer["token_ids"], answer["recoveries"]) == (expected["token_ids"], [])
    why = "takes no more from this client: rows of logits a minute: at most 600 for all peers, again in 0.1 s"
    assert done.ended_with(0, rf"waiting 0.1 s to go on: peer \S+ \(layers 0:8\) {why}"), done


async def test_a_tokenizer_that_is_not_handed_out(
    node: SwarmNode, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "glm-swarm"
    cache.mkdir(parents=True)
    (cache / "engine").symlink_to(cache_dir() / "engine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    with used_up(node, "pieces", 6):
        done = await chat(*HELLO, *IN_VAIN)
    why = r"peer \w+ takes no more from this client: pieces of the artifact a minute: at most 6 for all peers, .*"
    advice = "try again, or join through another peer with --initial-peers"
    assert done.ended_with(8, rf"the tokenizer of artifact \w+… could not be fetched \({why}\); {advice}"), done


async def test_a_node_that_leaves(node: SwarmNode, chat: Chat) -> None:
    node.shared.drain(60)
    try:
        done = await chat(*HELLO, *IN_VAIN)
    finally:
        node.shared.draining.clear()
        node.shared.state = NodeState.ONLINE
        node.shared.on_change()
    away = "the peers that serve layers 0:8 are joining or leaving; try again shortly, or start one: swarm-node .*"
    gone = rf"{PEER} is leaving the swarm: the node takes nothing new; try again shortly, or start one: .*"
    assert done.ended_with(7, away) or done.ended_with(8, gone), done


async def test_an_answer_that_fills_the_context(node: SwarmNode, chat: Chat) -> None:
    done = await chat(*WILD, "--context-tokens", "24", "--json", "-p", "Hello")
    answer = json.loads(done.stdout)
    assert (answer["stop_reason"], answer["context_tokens"]) == ("context full", 24)
    assert len(answer["token_ids"]) == 24 - answer["prompt_tokens"] + 1
    cut = "the answer is cut off: prompt and answer have filled the context of 24 tokens"
    advice = r"begin with less \(/clear\) or ask for more \(--context-tokens, nodes: --slots\)"
    assert done.ended_with(0, f"{cut}; {advice}"), done


async def test_a_conversation_outlives_its_session_and_its_context(
    node: SwarmNode, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "screen").open("wb") as log:
        child = pexpect.spawn(
            sys.executable,
            ["-m", "swarm.chat.cli", "--greedy", "--max-tokens", "8", "--effort", "none", "--trace"],
            env={**os.environ, **environment, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            dimensions=(40, 300),
            timeout=60,
            logfile=log,
        )
        screen = Terminal(child)
        await screen.sees("/help lists the commands")
        await screen.types("Hello", "ended by")
        monkeypatch.setattr(node.shared, "timeouts", replace(node.shared.timeouts, idle_seconds=0.1))
        async with every_slot_taken(node, tmp_path):
            assert node.shared.tally.unused["slot_needed"] == 1  # the chat's session, which waited for its next turn
        await screen.types("And again", r"recovered at position \d+ in .*it computed nothing for \d+ s and was ended")
        await screen.sees(r"another one needed its slot.* \d+ replayed")
        await screen.sees("-> here")
        await screen.types(
            "long " * 150,
            r"exceeds the chain's context of 128 tokens; shorten the prompt, or forget the conversation \(/clear\)",
        )
        await screen.types("/clear", "forgotten")
        await screen.types("Hello", "ended by")
        await screen.types("/quit", pexpect.EOF)
        child.close()
    assert child.exitstatus == 0


@dataclass(frozen=True)
class Terminal:
    """Waits in a thread, beside the node."""

    child: pexpect.spawn

    async def sees(self, pattern: str | type[pexpect.EOF]) -> None:
        await asyncio.to_thread(self.child.expect, pattern)

    async def types(self, line: str, pattern: str | type[pexpect.EOF]) -> None:
        self.child.send(f"{line}\r")
        await self.sees(pattern)

"""Whatever way a client leaves in the middle of a long prompt, every hop is free at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bench.faults import Accounting, idle_accounts, node_door, until_accounts, watched_swarm
from bench.links.linked_swarm import LinkedSwarm
from swarm.client import ClientConfig, GenerationOptions, SwarmClient

OPTIONS = ["--slots", "2x512", "--threads", "1", "--memory", "1GiB", "--chunk-tokens", "8"]
SPANS = [(0, 2), (2, 4), (4, 6)]
N_PROMPT = 320  # 40 chunks
HELD_AT = 80
FREE = ("sessions", "slots", "kv_tokens", "streams", "journals", "journal_bytes", "journal_file_bytes")

Leaving = contextlib.AbstractAsyncContextManager[Callable[[], object]]  # what it yields makes the client leave


async def test_leaving_amid_a_long_prompt_frees_every_hop(llama_untied_path: Path, tmp_path: Path) -> None:
    async with (
        watched_swarm(llama_untied_path, SPANS, tmp_path, OPTIONS) as swarm,
        SwarmClient.connect([swarm.address], ClientConfig(cache_dir=tmp_path)) as client,
    ):
        await (await client.generate([1] * 20, GenerationOptions(max_tokens=2))).finish()
        before = await idle_accounts(swarm)
        for leave in (_cancelled, _closed, _interrupted, _killed):
            door = node_door(swarm.nodes[1])
            await door.hold_at(HELD_AT)
            async with leave(swarm, client) as go:
                await door.held()
                await _until(swarm, lambda held: held["sessions"] == 1)
                assert (await Accounting.of(swarm.nodes[0])).held["kv_tokens"] > HELD_AT, "chunks are sent ahead"
                go()
                await _until(swarm, lambda held: not any(held[name] for name in FREE))
                await door.release()
            await until_accounts(swarm, before)


async def _until(swarm: LinkedSwarm, good: Callable[[dict[str, int]], bool], seconds: float = 30.0) -> None:
    """Of every node; far below the time after which a silent client's session is ended."""
    accounts: list[dict[str, int]] = []
    try:
        async with asyncio.timeout(seconds):
            while not accounts or not all(map(good, accounts)):
                accounts = [await node_door(node).account() for node in swarm.nodes]
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"after {seconds:g} s: {accounts}")


@contextlib.asynccontextmanager
async def _cancelled(_swarm: LinkedSwarm, client: SwarmClient) -> AsyncIterator[Callable[[], object]]:
    generation = await client.generate([7] * N_PROMPT, GenerationOptions(max_tokens=4))
    answer = asyncio.create_task(generation.finish())
    yield answer.cancel
    await asyncio.wait({answer})
    assert answer.cancelled()


@contextlib.asynccontextmanager
async def _closed(_swarm: LinkedSwarm, client: SwarmClient) -> AsyncIterator[Callable[[], object]]:
    """The whole client, with an answer under way."""
    async with SwarmClient.connect(client._initial_peers, client.config) as other:
        generation = await other.generate([7] * N_PROMPT, GenerationOptions(max_tokens=4))
        answer = asyncio.create_task(generation.finish())
        closing: list[asyncio.Task[None]] = []
        yield lambda: closing.append(asyncio.create_task(other.close()))
        await asyncio.wait({answer, *closing})
        assert answer.exception() is not None


@contextlib.asynccontextmanager
async def _chat(swarm: LinkedSwarm, number: signal.Signals) -> AsyncIterator[Callable[[], object]]:
    arguments = ["--initial-peers", swarm.address, "--raw", "--greedy", "--max-tokens", "4", "-p", "x" * N_PROMPT]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm.chat.cli", *arguments),
        env={**os.environ, "XDG_CONFIG_HOME": os.devnull},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield lambda: process.send_signal(number)
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, said) == ((130, b"") if number == signal.SIGINT else (-number, b""))


def _interrupted(swarm: LinkedSwarm, _client: SwarmClient) -> Leaving:
    """Ctrl-C."""
    return _chat(swarm, signal.SIGINT)


def _killed(swarm: LinkedSwarm, _client: SwarmClient) -> Leaving:
    """Its connections break."""
    return _chat(swarm, signal.SIGKILL)

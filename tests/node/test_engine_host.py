"""An engine that hangs is ended and started again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from shim.errors import EngineDied
from swarm.ids import SessionId
from swarm.node.config import Limits, Timeouts
from swarm.node.engine_host import EngineHost
from swarm.node.strikes import Strike
from tests.node.harness import until
from tests.shim.steps import config, prompt, token_rows

SESSION = SessionId(bytes(16))
OTHER = SessionId(bytes([1]) * 16)


async def test_an_engine_that_hangs_is_ended_and_blamed_on_the_call_it_hangs_in(llama_untied_path: Path) -> None:
    died: list[EngineDied] = []
    host = EngineHost(config(llama_untied_path), Timeouts(engine_seconds=3.0), Limits())
    host.on_lost = died.append
    info = await host.start()
    batch = token_rows((0, 6), prompt(4, info.n_vocab), want=[3])
    supervising = asyncio.create_task(host.supervise())
    try:
        await host.step((SESSION,), batch, ())
        assert host.pid is not None
        os.kill(host.pid, signal.SIGSTOP)
        with pytest.raises(EngineDied, match=r"killed by SIGKILL .*it answered no call for"):
            await host.step((SESSION,), batch, ())
        await until(lambda: host.ready and host.restarts == 1, seconds=120)
        assert host.strikes.of(SESSION) == Strike(alone=1) and host.blames(SESSION) and len(died) == 1
        await host.step((SESSION,), batch, ())
    finally:
        supervising.cancel()
        await asyncio.wait({supervising})
        await host.close()


async def test_only_the_oldest_call_is_blamed_and_a_shared_one_as_a_suspicion(llama_untied_path: Path) -> None:
    host = EngineHost(config(llama_untied_path), Timeouts(restart_first_seconds=0.01), Limits())
    blamed: list[tuple[bool, bool]] = []
    host.on_lost = lambda _died: blamed.append((host.blames(SESSION), host.blames(OTHER)))
    info = await host.start()
    batch = token_rows((0, 6), prompt(4, info.n_vocab), want=[3])
    supervising = asyncio.create_task(host.supervise())
    try:
        for restarts, calls in enumerate(
            [(), ((SESSION, OTHER), (SESSION,)), ((SESSION, OTHER),), ((OTHER,), (SESSION,))]
        ):
            await until(lambda: host.ready and host.restarts == restarts, seconds=120)  # noqa: B023
            assert host.pid is not None
            os.kill(host.pid, signal.SIGSTOP)
            steps = [asyncio.create_task(host.step(sessions, batch, ())) for sessions in calls]
            await asyncio.sleep(0)
            os.kill(host.pid, signal.SIGKILL)
            await until(lambda: not host.ready)
            assert [type(step.exception()) for step in steps] == [EngineDied] * len(steps)
        assert blamed == [(False, False), (True, True), (True, True), (False, True)]
        assert (host.strikes.of(SESSION), host.strikes.of(OTHER)) == (Strike(shared=2), Strike(alone=1, shared=2))
        assert host.strikes.refuses(OTHER) and not host.strikes.refuses(SESSION)
    finally:
        supervising.cancel()
        await asyncio.wait({supervising})
        await host.close()

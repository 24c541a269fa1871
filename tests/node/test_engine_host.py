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

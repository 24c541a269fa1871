"""What the user of ``swarm-chat`` reads when nodes have enough of everybody, or of this client."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pytest

from swarm.client import ClientConfig, SwarmClient
from swarm.local_swarm import LocalSwarm, local_swarm

CHAT = [sys.executable, "-m", "swarm.chat.cli"]
ASK = ["--greedy", "--max-tokens", "4"]


@pytest.fixture(scope="module")
def small(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """One node for one session, of which a client may open one a minute."""
    options = ["--slots", "1x512", "--threads", "1", "--opens-per-minute", "1"]
    with local_swarm(glm_tiny, [(0, 8)], tmp_path_factory.mktemp("small"), options) as swarm:
        yield swarm


@pytest.fixture
def environment(small: LocalSwarm, tmp_path: Path) -> dict[str, str]:
    folders = {f"XDG_{kind}_HOME": str(tmp_path / kind) for kind in ("STATE", "CONFIG")}
    return {**os.environ, **folders, "SWARM_PEERS": small.address}


def test_a_second_session_within_a_minute(environment: dict[str, str], tmp_path: Path) -> None:
    with (tmp_path / "screen").open("wb") as log:
        child = pexpect.spawn(
            CHAT[0],
            [*CHAT[1:], *ASK, "--wait-seconds", "2"],
            env={**environment, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            dimensions=(40, 300),
            timeout=60,
            logfile=log,
        )
        child.expect("/help lists the commands")
        child.expect(">")
        child.send("Hello\r")
        child.expect("tokens/s")
        child.send("/clear\r")  # its session, which would go on
        child.expect("forgotten")
        child.send("Hello\r")
        child.expect("takes no more from this client: sessions a minute: at most 1 for one peer, again in 5")
        child.expect("close other sessions or try again in 5")
        child.send("/quit\r")
        child.expect(pexpect.EOF)
        child.close()
    assert child.exitstatus == 0


async def test_no_free_slot(environment: dict[str, str], small: LocalSwarm, tmp_path: Path) -> None:
    config = ClientConfig(cache_dir=tmp_path)
    async with SwarmClient.connect([small.address], config) as client, await client.open_session(256):
        done = await asyncio.create_subprocess_exec(
            *CHAT, *ASK, "--wait-seconds", "1", "-p", "Hello", env=environment, stderr=asyncio.subprocess.PIPE
        )
        _, stderr = await done.communicate()
    lines = stderr.decode().splitlines()
    assert done.returncode in (7, 8)
    assert re.fullmatch(r"swarm-chat: .*(full|no free slot).*; .*", lines[-1]), lines
    assert any(re.search(r"waiting up to 1 s more: .*", line) for line in lines), lines

"""What a user of a running swarm can get wrong: one line that says what to do, a code of its own, no traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.local_swarm import LocalSwarm, local_swarm

CHAT = ("swarm.chat.cli", "--wait-seconds", "0", "--initial-peers")
FAST_CLOCK = """
import time
from importlib import import_module

real = time.time
time.time = lambda: real() + 30
raise SystemExit(import_module({module!r}).main({arguments!r}))
"""


@pytest.fixture(scope="module")
def whole(llama_untied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """All six layers, in slots of 256 tokens."""
    with local_swarm(llama_untied_path, [(0, 6)], tmp_path_factory.mktemp("whole"), ["--slots", "1x256"]) as swarm:
        yield swarm


def test_layers_that_nobody_serves(llama_untied_path: Path, tmp_path: Path) -> None:
    with local_swarm(llama_untied_path, [(0, 2), (4, 6)], tmp_path, ["--slots", "1x256"]) as swarm:
        ended = _run(*CHAT, swarm.address, "-p", "Hello")
    assert ended.returncode == 7
    line = _only_line(ended, "swarm-chat")
    assert "no peer serves layers 2:4" in line
    assert re.search(rf"swarm-node --model \S+ --layers 2:4 --initial-peers {re.escape(swarm.address)}$", line)


def test_prompt_longer_than_the_context(whole: LocalSwarm) -> None:
    ended = _run(*CHAT, whole.address, "-p", "x" * 1000)
    assert ended.returncode == 9
    assert re.search(r"the prompt of \d+ tokens .*256 tokens; shorten the prompt", _only_line(ended, "swarm-chat"))


def test_clock_of_a_client_is_off(whole: LocalSwarm) -> None:
    ended = _with_fast_clock("swarm.chat.cli", ["--initial-peers", whole.address, "-p", "Hello"])
    assert ended.returncode == 6
    assert re.search(r"clock is (29\.|30\.)\d s ahead of the swarm's .*: set it", _only_line(ended, "swarm-chat"))


def test_clock_of_a_node_is_off(whole: LocalSwarm, llama_untied_path: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(llama_untied_path), "--layers", "0:6", "--initial-peers", whole.address]
    arguments += ["--listen", "127.0.0.1:0", "--identity", str(tmp_path / "key")]
    ended = _with_fast_clock("swarm.node.cli", arguments)
    assert ended.returncode == 6
    assert re.search(r"clock is (29\.|30\.)\d s ahead of the swarm's .*: set it", _only_line(ended, "swarm-node"))


def _with_fast_clock(module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    script = FAST_CLOCK.format(module=module, arguments=arguments)
    return _ended([sys.executable, "-c", script])


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _ended([sys.executable, "-m", module, *arguments])


def _ended(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)


def _only_line(ended: subprocess.CompletedProcess[str], program: str) -> str:
    """What was complained of, without lines of progress."""
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith(f"{program}: ")]
    assert ended.stderr.splitlines()[-1] == lines[-1]
    return lines[-1]

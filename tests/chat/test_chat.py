"""``swarm-chat`` as people and scripts use it: pipes, a terminal, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pytest

from swarm.chat.cli import main
from swarm.local_swarm import LocalSwarm

FRANCE = "Name the capital of France."
CHAT = [sys.executable, "-m", "swarm.chat.cli"]


@pytest.fixture(scope="package")
def environment(swarm: LocalSwarm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Peers by environment; history and settings in folders of the test."""
    home = tmp_path_factory.mktemp("home")
    folders = {f"XDG_{kind}_HOME": str(home / kind) for kind in ("STATE", "CONFIG")}
    return {**folders, "SWARM_PEERS": swarm.address}


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def chat(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Runs the command in this process, which saves the seconds that loading the network takes."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = main(arguments)
        return Done(code, *capsys.readouterr())

    return run


Chat = Callable[..., Done]


def test_one_answer_on_stdout_and_nothing_else(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*CHAT, "--greedy", "--max-tokens", "24", "-p", FRANCE],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    # the first client of a machine says what it waits for
    assert [line for line in done.stderr.splitlines() if "fetching the tokenizer" not in line] == []


def test_a_piped_prompt_with_route_and_trace(chat: Chat) -> None:
    done = chat("--greedy", "--max-tokens", "4", "--show-route", "--trace", stdin=FRANCE)
    assert done.code == 0, done.stderr
    assert "capital" in done.stdout
    assert re.search(r"^route: \S+ 0:15 -> \S+ 15:30$", done.stderr, re.M)
    assert re.search(r"^4 tokens, [\d.]+ tokens/s, first after [\d.]+ s, ended by max tokens$", done.stderr, re.M)
    for part in ("network here ->", "0:15 compute", "15:30 queue", "-> here"):
        assert part in done.stderr


def test_an_effort_is_said_to_change_nothing_where_it_does_not(chat: Chat) -> None:
    done = chat("--greedy", "--max-tokens", "4", "--effort", "high", "--no-show-route", stdin=FRANCE)
    assert done.code == 0, done.stderr
    wrong = "swarm-chat: SmolLM2-135M-Instruct.Q4_1 answers without thinking; an effort changes nothing"
    assert [line for line in done.stderr.splitlines() if "fetching the tokenizer" not in line] == [wrong]


def test_json_holds_everything_about_the_answer(chat: Chat) -> None:
    done = chat("--greedy", "--max-tokens", "12", "--json", "-p", FRANCE)
    assert done.code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "Paris" in answer["answer"]
    assert len(answer["token_ids"]) <= 12
    assert answer["prompt_tokens"] > 7
    assert answer["stop_reason"] in ("max tokens", "stop token")
    assert [hop["layers"] for hop in answer["route"]] == [[0, 15], [15, 30]]
    assert answer["tokens_per_second"] > 0
    assert answer["first_token_seconds"] > 0
    for hop in answer["hops"]:
        for what in ("queue", "compute", "serialise", "ipc", "network"):
            assert 0 <= hop[f"{what}_ms"]["p50"] <= hop[f"{what}_ms"]["p95"]
        assert hop["compute_ms"]["p50"] > 0


def test_a_seed_repeats_an_answer(chat: Chat) -> None:
    arguments = ("--temperature", "1.2", "--top-k", "50", "--seed", "3", "--max-tokens", "12", "-p", "Name a river.")
    assert chat(*arguments).stdout == chat(*arguments).stdout


def test_a_stop_string_and_a_system_prompt(chat: Chat) -> None:
    done = chat("--greedy", "--system", "Be brief.", "--stop", "is", "-p", FRANCE, "--json")
    answer = json.loads(done.stdout)
    assert answer["stop_reason"] == "stop string"
    assert "is" not in answer["answer"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (
            ["--model", "other", "--wait-seconds", "0"],
            3,
            r"does not serve other but .*; choose one of these with --model",
        ),
        (["--max-tokens", "600"], 9, r"prompt of \d+ tokens and 600 tokens .* 512 tokens; shorten the prompt or lower"),
        (["--timeout", "0.001"], 10, r"not finished within 0.001 s; allow more with --timeout"),
    ],
)
def test_what_goes_wrong_ends_in_one_line(chat: Chat, arguments: list[str], code: int, text: str) -> None:
    done = chat(*arguments, "-p", FRANCE)
    assert done.code == code
    assert re.fullmatch(rf"swarm-chat: .*{text}.*\n", done.stderr), done.stderr
    assert done.stdout == ""


def test_nobody_at_the_address_ends_in_one_line(chat: Chat, environment: dict[str, str]) -> None:
    address = re.sub(r"/tcp/\d+/", "/tcp/1/", environment["SWARM_PEERS"])
    done = chat("--initial-peers", address, "-p", FRANCE)
    assert done.code == 6
    assert re.fullmatch(r"swarm-chat: no initial peer answered .*; check .*\n", done.stderr), done.stderr


def test_an_interrupt_ends_one_answer_with_130(environment: dict[str, str]) -> None:
    command = [*CHAT, "--greedy", "-p", "Tell me a long story."]
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == b""


def test_a_reader_that_has_enough_ends_it_quietly(environment: dict[str, str]) -> None:
    command = [*CHAT, "--greedy", "-p", "Tell me a long story."]
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4)
        process.stdout.close()
        assert process.wait(20) == 141
        assert process.stderr.read() == b""


def test_a_full_disk_ends_in_one_line(environment: dict[str, str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*CHAT, "--greedy", "--max-tokens", "4", "-p", FRANCE],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "swarm-chat: the answer can't be written (no space left on device); free some space, or write it elsewhere\n"
    )


def test_a_conversation_in_a_terminal(environment: dict[str, str], tmp_path: Path) -> None:
    with (tmp_path / "screen").open("wb") as log:
        child = pexpect.spawn(
            CHAT[0],
            [*CHAT[1:], "--greedy", "--max-tokens", "200"],
            env={**os.environ, **environment, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            dimensions=(40, 120),
            timeout=60,
            logfile=log,
        )
        child.expect("/help lists the commands")
        child.expect(">")
        child.send("Name the capital\x1b\rof France.\r")
        child.expect("route: ")
        child.expect("Paris")
        child.expect("tokens/s")
        child.send("/route\r")
        child.expect("route: .*tokens/s")
        child.send("Tell me a very long story about the sea.\r")
        child.expect("route: ")
        child.expect("sea")
        child.sendintr()
        child.expect("stopped")
        child.send("Once more.\r")
        child.expect("prompt tokens were there already")  # also what was stopped
        child.send("/nonsense\r")
        child.expect("/nonsense is no command")
        child.send("/quit\r")
        child.expect(pexpect.EOF)
        child.close()
    assert child.exitstatus == 0
    history = Path(environment["XDG_STATE_HOME"]) / "glm-swarm" / "chat-history"
    assert "+of France." in history.read_text()
    assert history.stat().st_mode & 0o077 == 0

"""A model that thinks, through a swarm: in the library's stream, in a terminal, in a pipe, from turn to turn."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect  # type: ignore[import-untyped]
import pytest

from swarm import Answer, ClientConfig, GenerationOptions, SwarmClient, Thinking
from swarm.chat.cli import main
from swarm.chat.options import parse
from swarm.chat.screen import Screen
from swarm.chat.talk import Conversation
from swarm.client.progress import StopReason
from swarm.local_swarm import LocalSwarm, local_swarm

FRANCE = "What is the capital of France?"
GERMANY = "What is the capital of Germany?"
THOUGHT = "The capital of France is Paris."
STILL_THINKING = (
    "swarm-chat: the answer was ended by max tokens while the model was still thinking; "
    "give it more room (--max-tokens, --context-tokens) or less to think about (--effort)\n"
)


@pytest.fixture(scope="module")
def thinkers(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """glm-tiny in two processes."""
    folder = tmp_path_factory.mktemp("thinkers")
    with local_swarm(glm_tiny, [(0, 2), (2, 8)], folder, ["--slots", "2x512", "--threads", "1"]) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ClientConfig:
    return ClientConfig(cache_dir=tmp_path_factory.mktemp("artifacts"))


def ask(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


async def test_thinking_and_answer_are_separate_events(thinkers: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([thinkers.address], config) as client:
        generation = await client.chat(ask(FRANCE), GenerationOptions())
        events = [event async for event in generation.events()]
        thoughts = [event.text for event in events if isinstance(event, Thinking)]
        answers = [event.text for event in events if isinstance(event, Answer)]
        assert events == [*map(Thinking, thoughts), *map(Answer, answers)]
        assert len(thoughts) > 1
        assert ("".join(thoughts), "".join(answers)) == (THOUGHT, "Paris")
        assert generation.progress.text == f"{THOUGHT}</think>Paris"
        assert generation.progress.reply.message() == {
            "role": "assistant",
            "content": "Paris",
            "reasoning_content": THOUGHT,
        }


async def test_it_stops_on_the_next_role(thinkers: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([thinkers.address], config) as client:
        artifact = await client.artifact()
        generation = await client.chat(ask(FRANCE), GenerationOptions())
        tokens = [token async for token in generation]
        assert [token.id for token in tokens if token.is_stop] == artifact.encode("<|user|>")
        assert tokens[-1].is_stop
        assert generation.progress.stop_reason is StopReason.STOP_TOKEN
        assert artifact.encode("</think>")[0] in generation.progress.token_ids


async def test_the_end_may_come_while_it_thinks(thinkers: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([thinkers.address], config) as client:
        generation = await client.chat(ask(FRANCE), GenerationOptions(max_tokens=3))
        thought = "".join([event.text async for event in generation.events()])
        reply = generation.progress.reply
        assert thought == reply.thinking == generation.progress.text
        assert THOUGHT.startswith(thought)
        assert (reply.answer, reply.thinking_unfinished) == ("", True)


async def test_it_can_answer_without_thinking(thinkers: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([thinkers.address], config) as client:
        generation = await client.chat(ask(FRANCE), GenerationOptions(), enable_thinking=False)
        assert await generation.finish() == "Paris" == generation.progress.text
        assert generation.progress.reply.message() == {"role": "assistant", "content": "Paris"}


async def test_effort_and_tools_reach_the_prompt(thinkers: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([thinkers.address], config) as client:
        artifact = await client.artifact()

        async def prompt(**given: Any) -> str:
            generation = await client.chat(ask(FRANCE), GenerationOptions(), **given)
            return b"".join(artifact.vocab.piece(token) for token in generation.prompt).decode()

        assert "Effort: Max<|user|>" in await prompt()
        assert "Effort: High<|user|>" in await prompt(reasoning_effort="high")
        assert "Effort" not in await prompt(enable_thinking=False)
        assert '{"name": "time"}' in await prompt(tools=[{"type": "function", "function": {"name": "time"}}])


@pytest.mark.parametrize("keep", [False, True])
async def test_thinking_leaves_the_next_turn_unless_it_is_kept(
    thinkers: LocalSwarm, config: ClientConfig, keep: bool
) -> None:
    async with SwarmClient.connect([thinkers.address], config) as client:
        options = parse(["--greedy", *(["--keep-thinking"] if keep else [])])
        conversation = Conversation(client, await client.artifact(), options, Screen(options))
        await conversation.turn(FRANCE)
        first = conversation.last
        assert first is not None
        assert conversation.messages == [
            {"role": "user", "content": FRANCE},
            {"role": "assistant", "content": "Paris", "reasoning_content": THOUGHT},
        ]
        await conversation.turn(GERMANY)
        assert conversation.last is not None
        computed = (*first.prompt, *first.progress.token_ids)
        assert (conversation.last.prompt[: len(computed)] == computed) is keep
        assert len(conversation.messages) == 4


async def test_a_turn_without_an_answer_is_forgotten(thinkers: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([thinkers.address], config) as client:
        options = parse(["--greedy", "--max-tokens", "3"])
        conversation = Conversation(client, await client.artifact(), options, Screen(options))
        await conversation.turn(FRANCE)
        assert conversation.messages == []


@pytest.fixture
def run(
    thinkers: LocalSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """The command without a terminal: stdout and stderr."""
    monkeypatch.setenv("SWARM_PEERS", thinkers.address)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def run(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FRANCE.encode())))
        assert main(["--greedy", *arguments]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def test_a_pipe_gets_the_answer_only(run: Callable[..., tuple[str, str]]) -> None:
    assert run()[0] == "Paris\n"
    assert run() == ("Paris\n", "")  # now that the tokenizer is there
    assert run("--effort", "none") == ("Paris\n", "")
    assert run("--show-thinking") == ("Paris\n", f"{THOUGHT}\n")
    assert run("--max-tokens", "3") == ("\n", STILL_THINKING)


def test_json_has_thinking_and_answer(run: Callable[..., tuple[str, str]]) -> None:
    answer = json.loads(run("--json")[0])
    assert (answer["answer"], answer["thinking"], answer["thinking_unfinished"]) == ("Paris", THOUGHT, False)
    assert answer["tool_calls"] == []
    answer = json.loads(run("--json", "--max-tokens", "3")[0])
    assert (answer["answer"], answer["thinking_unfinished"]) == ("", True)


def test_a_terminal_shows_thinking_dimmed(thinkers: LocalSwarm, tmp_path: Path) -> None:
    folders = {f"XDG_{kind}_HOME": str(tmp_path / kind) for kind in ("STATE", "CONFIG")}
    environment = {**os.environ, **folders, "SWARM_PEERS": thinkers.address, "TERM": "xterm"}
    child = pexpect.spawn(
        sys.executable,
        ["-m", "swarm.chat.cli", "--greedy", "--no-show-route"],
        env={**environment, "PROMPT_TOOLKIT_NO_CPR": "1"},
        dimensions=(40, 120),
        timeout=120,
    )
    child.expect("/help lists the commands")
    child.send(f"{FRANCE}\r")
    child.expect(r"\x1b\[2mThe")
    child.expect(r"\x1b\[2m\.\x1b\[22m\r\nParis\r\n")
    child.send("/effort\r")
    child.expect(r"effort is max; change it with /effort max\|high\|none")
    child.send("/effort low\r")
    child.expect(r"low is no effort; effort is max; change it with")
    child.send("/effort none\r")
    child.expect("effort none from the next turn on")
    child.send(f"{FRANCE}\r")
    child.expect(r"[^m]Paris\r\n")
    assert b"\x1b[2m" not in child.before
    child.send("/quit\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0

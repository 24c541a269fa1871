"""The command line without a swarm: what it says, and how fast."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.chat.cli import _piped, main
from swarm.chat.options import parse
from swarm.chat.settings import initial_peers
from swarm.client.config import Timeouts
from swarm.errors import UsageError

PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWEZXjE41uU4EL2gpkAQeDXYok6wghN7wwNVPF5bwkaNfS"
OTHER = "/ip4/192.0.2.8/tcp/4001/p2p/12D3KooWEZXjE41uU4EL2gpkAQeDXYok6wghN7wwNVPF5bwkaNfS"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense; see swarm-chat --help"),
        (["--max-tokens", "0"], "0 is not a number above 0"),
        (["--max-tokens", "many"], "invalid"),
        (["--timeout", "-1"], "not a number of seconds"),
        (["--effort", "low"], "invalid choice: 'low'"),
        (["--initial-peers", "localhost:1"], "is not the address of a peer; use /ip4/HOST/tcp/PORT/p2p/PEER_ID"),
        (["-p", " "], "the prompt is empty"),
        (["--temperature", "-1", "-p", "x"], "--temperature -1.0; give 0, or 0.01 to 100"),
        (["--top-p", "2", "-p", "x"], "--top-p 2.0; give a number above 0, up to 1"),
    ],
)
def test_a_wrong_option_ends_in_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.startswith("swarm-chat: ")
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_peers_come_from_options_then_environment_then_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    assert initial_peers((), {}, file) == ()
    file.write_text(f'model = "x"\ninitial_peers = ["{OTHER}"]\n')
    assert initial_peers((), {}, file) == (OTHER,)
    assert initial_peers((), {"SWARM_PEERS": f"{PEER}, {OTHER}"}, file) == (PEER, OTHER)
    assert initial_peers((PEER,), {"SWARM_PEERS": OTHER}, file) == (PEER,)


@pytest.mark.parametrize("text", ["initial_peers = 3", "initial_peers = [1]", "=", "\xff"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=rf"{file}.*; correct"):
        initial_peers((), {}, file)


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ([], {}),
        (["--effort", "max"], {"reasoning_effort": "max"}),
        (["--reasoning-effort", "high"], {"reasoning_effort": "high"}),
        (["--effort", "none"], {"enable_thinking": False}),
        (["--keep-thinking"], {"clear_thinking": False}),
    ],
)
def test_options_become_template_variables(arguments: list[str], variables: dict[str, object]) -> None:
    given = parse(arguments).thinking()
    assert {name: value for name, value in given.items() if value is not None} == variables


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert "exit codes:" in text


@pytest.mark.parametrize("statement", ["import swarm", "from swarm.chat import options; options.parse([])"])
def test_the_network_is_not_loaded_before_it_is_needed(statement: str) -> None:
    check = f"{statement}; import sys; print(sorted({{'hivemind', 'torch', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_of_the_package_exists() -> None:
    import swarm
    import swarm.client

    for package in (swarm, swarm.client):
        for name in package.__all__:
            assert getattr(package, name) is not None
    with pytest.raises(AttributeError):
        swarm.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("piped", "raw", "prompt"),
    [("a\n", False, "a"), ("a\r\n", False, "a"), ("a\n\n", False, "a\n"), (" a ", False, " a "), ("a\n", True, "a\n")],
)
def test_the_line_break_that_ends_a_piped_prompt_goes(
    piped: str, raw: bool, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
    assert _piped(raw=raw) == prompt


def test_the_help_says_that_an_answer_survives_its_peers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"up to {Timeouts().recover_seconds:g} s" in capsys.readouterr().out


def test_a_standby_is_taken_only_when_it_is_asked_for() -> None:
    assert parse(["--standby"]).standby and not parse([]).standby

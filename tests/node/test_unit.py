"""The systemd unit that ``--print-unit`` prints, as systemd itself reads it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.errors import UsageError
from swarm.node.arguments import parse
from swarm.node.gather import gather
from swarm.node.unit import STEPS_SINCE, Call, unit_text
from tests.node.test_cli import COMMAND, LOCAL, Node, run

PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWSHj3RRbBjD15g6wekV8y3mm57Pobmps2g2WJm6F67Lay"
NASTY = ("50% of $HOME", "say \"no\" \\ 'yes'", "%i%%n", "a;b #c", "-x", "päivää", "\\", "{}", "ends in \\")

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing; install systemd to check units"
)


def call(
    folder: Path, *line: str, environment: Mapping[str, str] | None = None, interpreter: Path | None = None
) -> Call:
    given = vars(parse(line))
    gathered = gather(given, environment or {}, folder / "absent.toml", named=False)
    return Call(
        interpreter=str(interpreter or sys.executable),
        given=gathered.outside,
        config=given.get("config"),
        environment=environment or {},
        folder=folder,
        user="someone",
        systemd_version=STEPS_SINCE - 1,
    )


def text_of(made: Call, *, system: bool = False) -> str:
    gathered = gather(made.given, {}, Path("/no/such.toml"), named=False)
    return unit_text(made, gathered.settings, system=system)


def as_systemd_reads(text: str, folder: Path, *, system: bool = False) -> str:
    """What it has understood; with not a word of complaint."""
    path = folder / "swarm-node.service"
    path.write_text(text)
    command = ["systemd-analyze", "--system" if system else "--user", "verify", str(path)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    environment.pop("SYSTEMD_LOG_LEVEL", None)
    checked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    environment["SYSTEMD_LOG_LEVEL"] = "debug"
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    unit = re.search(r"(?ms)^-> Unit swarm-node\.service:$.*?(?=^-> |\Z)", shown.replace("\t-> Unit", "-> Unit"))
    assert unit is not None, shown
    return unit[0]


def words(line: str) -> list[str]:
    """``line`` as a shell takes it apart, which is how systemd shows a command."""
    command = ["bash", "-c", f"printf '%s\\0' {line}"]
    shown = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.decode()
    return shown.split("\0")[:-1]


def command_line(understood: str) -> list[str]:
    found = re.search(r"Command Line: (.*)", understood)
    assert found is not None, understood
    return words(found[1])


@needs_systemd
@pytest.mark.parametrize("system", [False, True])
def test_systemd_runs_this_very_command_line(tmp_path: Path, system: bool) -> None:
    line = ("--initial-peers", PEER, "--weights", "locked", "--drain-seconds", "120", "--no-mtp", "--no-color")
    understood = as_systemd_reads(text_of(call(tmp_path, *line), system=system), tmp_path, system=system)
    expected = [f"--initial-peers={PEER}", "--weights=locked", "--drain-seconds=120.0", "--no-mtp", "--no-color"]
    ran = command_line(understood)
    assert ran[:4] == [sys.executable, "-P", "-m", "swarm.node.cli"]
    assert sorted(ran[4:]) == sorted(expected)
    assert vars(parse(ran[4:])) == vars(parse(line))
    for said in ("KillMode: mixed", "OOMPolicy: continue", "TimeoutStopSec: 2min 30s"):
        assert said in understood
    assert re.search(r"LimitMEMLOCK: (infinity|18446744073709551615)", understood)
    assert ("User: someone" in understood) == system
    assert ("Wants: network-online.target" in understood) == system


@needs_systemd
def test_spaces_quotes_and_percent_signs_arrive_as_they_were_given(tmp_path: Path) -> None:
    folder = tmp_path / "a b 100% $c"
    folder.mkdir()
    interpreter = folder / "py thon"
    interpreter.symlink_to(sys.executable)
    line = ["--initial-peers", PEER, "--data-dir", "my data", "--model", "own 5%.gguf"]
    for text in NASTY:
        line += [f"--public-name={text}", f"--announce-maddrs={text}"]
    made = call(folder, *line, environment={"XDG_DATA_HOME": '/data 7% "$x"'}, interpreter=interpreter)
    understood = as_systemd_reads(text_of(made), tmp_path)
    ran = command_line(understood)
    assert ran[0] == str(interpreter)
    given = vars(parse(ran[4:]))
    assert given["announce_maddrs"] == list(NASTY)
    assert given["public_name"] == NASTY[-1]
    assert given["data_dir"] == str(folder / "my data")
    assert given["model"] == str(folder / "own 5%.gguf")
    assert 'Environment: XDG_DATA_HOME=/data 7% "$x"' in understood


@needs_systemd
def test_it_comes_back_after_failures_but_not_after_mistakes(tmp_path: Path) -> None:
    made = call(tmp_path, "--new-swarm")
    understood = as_systemd_reads(text_of(made), tmp_path)
    assert "Restart: on-failure" in understood
    text = text_of(made)
    assert "\nRestartPreventExitStatus=2 4\n" in text
    assert "\nWantedBy=default.target\n" in text
    assert "\nWantedBy=multi-user.target\n" in text_of(made, system=True)
    growing = text_of(replace(made, systemd_version=STEPS_SINCE))
    assert "\nRestartSec=5\nRestartSteps=8\nRestartMaxDelaySec=600\n" in growing
    assert "LimitMEMLOCK" not in text


def test_what_the_environment_says_becomes_an_option(tmp_path: Path) -> None:
    environment = {"SWARM_PEERS": PEER, "SWARM_GLM52_DIR": "/models", "PATH": "/bin", "HF_TOKEN": "hf_secret"}
    text = text_of(call(tmp_path, environment=environment))
    assert f"--initial-peers={PEER}" in text
    assert "--model-dir=/models" in text
    assert "Environment=" not in text
    assert "hf_secret" not in text
    assert "# HF_TOKEN is not written here" in text


@pytest.mark.parametrize("system", [False, True])
def test_it_reaches_the_network_as_the_command_by_hand_does(tmp_path: Path, system: bool) -> None:
    environment = {
        "https_proxy": "http://192.0.2.1:3128",
        "NO_PROXY": "localhost,.example",
        "HTTP_PROXY": "http://me:secret@192.0.2.1:3128",
        "SSL_CERT_FILE": "/etc/my certificates.pem",
        "PATH": "/bin",
    }
    text = text_of(call(tmp_path, "--new-swarm", environment=environment), system=system)
    lines = text.splitlines()
    assert "Environment=https_proxy=http://192.0.2.1:3128" in lines
    assert "Environment=NO_PROXY=localhost,.example" in lines
    assert 'Environment="SSL_CERT_FILE=/etc/my certificates.pem"' in lines
    assert text.count("Environment=") == 4  # the remark has one
    assert "secret" not in text
    scope = "" if system else "--user "
    assert "# HTTP_PROXY has a password and is not written here" in text
    assert f"`systemctl {scope}edit swarm-node`" in text
    as_systemd_reads(text, tmp_path, system=system)


def test_a_file_of_settings_is_named_with_its_whole_path(tmp_path: Path) -> None:
    text = text_of(call(tmp_path, "--config", "my.toml", "--new-swarm"))
    assert f"--config={tmp_path}/my.toml" in text


def test_a_line_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--public-name: a line break or control character can't stand in a unit"):
        text_of(call(tmp_path, "--new-swarm", "--public-name", "a\nExecStartPre=/bin/false"))


@pytest.mark.parametrize("interpreter", ['/a"b/python', "/a\\b/python", "/it's/python"])
def test_a_program_that_systemd_would_not_run_is_refused(tmp_path: Path, interpreter: str) -> None:
    with pytest.raises(
        UsageError, match=r"systemd runs no program whose path has quotes or backslashes, as .*; install"
    ):
        text_of(call(tmp_path, "--new-swarm", interpreter=Path(interpreter)))


def test_it_says_how_to_install_it(tmp_path: Path) -> None:
    lines = text_of(call(tmp_path, "--new-swarm", "--public-name", "my node", "--weights", "locked")).splitlines()
    remarks = [line[2:] for line in lines[: lines.index("")]]
    assert all(line.startswith("# ") for line in lines[: len(remarks)])
    folder = "~/.config/systemd/user"
    again = f"mkdir -p {folder} && swarm-node --new-swarm '--public-name=my node' --weights=locked --print-unit"
    assert f"  {again} > {folder}/swarm-node.service" in remarks
    assert "  systemctl --user daemon-reload && systemctl --user enable --now swarm-node" in remarks
    assert "  loginctl enable-linger" in remarks
    assert any("`ulimit -H -l`" in line for line in remarks)


# --- the program


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SWARM_PEERS", "SWARM_MODEL"))}
    return kept | {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "data")}


def test_a_unit_is_printed_for_a_command_line_that_would_start(environment: dict[str, str], tmp_path: Path) -> None:
    ended = run(environment, "--initial-peers", PEER, "--print-unit")
    assert ended.returncode == 0
    assert "WantedBy=default.target" in ended.stdout
    assert f"Environment=XDG_DATA_HOME={tmp_path}/data" in ended.stdout
    assert not (tmp_path / "data").exists(), "nothing was begun"
    ended = run(environment, "--initial-peers", PEER, "--memory", "much", "--print-unit")
    assert (ended.returncode, ended.stdout) == (2, "")
    ended = run(environment, "--print-unit", "system")
    assert (ended.returncode, ended.stdout) == (6, "")


def test_the_commands_exec_line_starts_a_node_that_systemds_signal_ends(
    environment: dict[str, str], llama_untied_path: Path, tmp_path: Path
) -> None:
    """As systemd would run it: from another folder, with little in the environment."""
    model = os.path.relpath(llama_untied_path)
    printed = run(environment, "--model", model, "--layers", "0:6", "--new-swarm", *LOCAL, "--print-unit").stdout
    found = re.search(r"(?m)^ExecStart=:(.*)$", printed)
    assert found is not None
    kept = dict(line.split("=", 1) for line in re.findall(r"(?m)^Environment=(.*)$", printed))
    little = {"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], **kept}
    process = subprocess.Popen(
        words(found[1]), env=little, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        node = Node(process)
        node.read_until("^ready: serving layers 0:6")
        assert node.leave(signal.SIGTERM) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_print_config_writes_a_file_that_does_the_same(environment: dict[str, str], tmp_path: Path) -> None:
    printed = run(environment, "--initial-peers", PEER, "--data-dir", "here", "--print-config")
    assert printed.returncode == 0
    file = tmp_path / "written.toml"
    file.write_text(printed.stdout)
    again = run(environment, "--config", str(file), "--print-config")
    assert again.stdout == printed.stdout
    assert f'\ndata_dir = "{Path.cwd()}/here"\n' in printed.stdout
    assert COMMAND[0] == sys.executable

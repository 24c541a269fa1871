"""What a newcomer gets: the demo, a clean environment, a wheel that works elsewhere."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import psutil
import pytest

import swarm
from swarm import __version__
from swarm.config_file import config_path
from swarm.store.place import default_folder

ROOT = Path(__file__).resolve().parent.parent.parent


def test_demo_answers_and_leaves_no_process_behind(smollm2_path: Path) -> None:
    tag = f"demo-{os.getpid()}"
    done = subprocess.run(
        [sys.executable, "-m", "swarm.demo"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "SWARM_TEST_TAG": tag},
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert len(re.findall(r"(?m)^ready: ", done.stderr)) == 3
    assert re.search(r"\d tokens/s", done.stderr)
    assert _left_over(tag) == []


def test_a_demo_that_is_told_to_end_leaves_nothing_behind(smollm2_path: Path, tmp_path: Path) -> None:
    tag = f"ended-demo-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-m", "swarm.demo"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SWARM_TEST_TAG": tag, "TMPDIR": str(tmp_path)},
    ) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if line.startswith("starting node 2"):
                break
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 130
    assert _left_over(tag) == []
    assert list(tmp_path.glob("glm-swarm-*")) == []


def test_environment_holds_no_nvidia_package() -> None:
    names = [distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions()]
    assert [name for name in names if name.startswith("nvidia")] == []


def test_wheel_installs_and_runs_in_a_clean_environment(tmp_path: Path, smollm2_path: Path) -> None:
    """Its dependencies come from this environment; the package itself comes only from the wheel."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=900)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert re.search(r"-py3-none-(linux|manylinux)", wheel.name)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "empty")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, env=environment, check=True, timeout=300)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    ran = subprocess.run(
        [python, "-c", LOAD, smollm2_path], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(site / "shim" / "__init__.py"), "2"]
    swarm_node = tmp_path / "venv" / "bin" / "swarm-node"
    for arguments, expected in (
        (["--help"], "examples:"),
        (["--new-swarm", "--print-unit"], f"ExecStart=:{python} -P -m swarm.node.cli --new-swarm"),
    ):
        ran = subprocess.run(
            [swarm_node, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert expected in ran.stdout


def test_an_upgrade_keeps_what_was_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and settings are where neither pip nor a new environment looks."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for place in (default_folder("glm-5.2-ud-iq1_s"), config_path()):
        assert place.is_relative_to(tmp_path / "home")
        assert __version__ not in str(place)
        assert not place.is_relative_to(sys.prefix)
        assert not place.is_relative_to(Path(swarm.__file__).parent)


LOAD = """
import sys
from pathlib import Path

import shim
from shim.engine import Engine
from shim.types import EngineConfig

with Engine.open(EngineConfig(Path(sys.argv[1]), last=2)) as engine:
    print(shim.__file__, engine.info.last)
"""


def _left_over(tag: str) -> list[psutil.Process]:
    """What is still there after a moment: the kernel ends the children of a process just after the process itself."""
    _, alive = psutil.wait_procs(_tagged(tag), timeout=2)
    return list(alive)


def _tagged(tag: str) -> list[psutil.Process]:
    """Processes that inherited the environment of the one that was started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SWARM_TEST_TAG") == tag:
                found.append(process)
        except psutil.Error:
            continue
    return found

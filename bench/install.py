"""What a volunteer's installation takes: builds the wheel, installs it into an environment of its own as README says,
and lets that one serve glm-tiny from another folder.

    python -m bench.install [--torch-index URL] [--record evidence]

Needs about 3 GB of disk for as long as it runs. Downloads are counted as files: what the package index sends for them.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.record import Record, this_commit, this_machine
from swarm.artifact.catalog import GLM_TINY, KNOWN

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 300
MAX_DISK_BYTES = 2 << 30  # a CUDA build alone has more


@dataclass(frozen=True)
class Installed:
    """Of one installation. ``numerics`` is what its engine calls itself."""

    wheel_bytes: int
    download_bytes: int
    download_seconds: float
    install_seconds: float
    disk_bytes: int
    packages: dict[str, str]
    help_seconds: float
    ready_seconds: float
    numerics: str
    largest: dict[str, int]  # bytes of the largest folders


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-index", metavar="URL", help="package index of PyTorch's CPU builds")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write the record there")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="install-", dir=given.folder) as folder:
        installed = measure(Path(folder), given.torch_index)
    record = as_record(installed, index_given=given.torch_index is not None)
    show(installed)
    if given.record is not None:
        print(record.write(given.record), file=sys.stderr)
    return 0 if record.verdict == "reached" else 1


def measure(folder: Path, torch_index: str | None) -> Installed:
    """Raises CalledProcessError when a step fails."""
    wheel = _build(folder / "dist")
    _say("making an environment")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    empty_bytes = _disk_bytes(folder / "venv")
    _say("downloading")
    start = time.monotonic()
    store = folder / "downloads"
    pip = [str(python), "-m", "pip", "--quiet", "--no-cache-dir"]
    if torch_index is not None:
        _run([*pip, "download", "--dest", str(store), "--index-url", torch_index, _torch()], folder)
    _run([*pip, "download", "--dest", str(store), "--find-links", str(store), str(wheel)], folder)
    download_seconds = time.monotonic() - start
    download_bytes = sum(path.stat().st_size for path in store.iterdir() if path.name != wheel.name)
    _say("installing")
    start = time.monotonic()
    _run([*pip, "install", "--find-links", str(store), str(wheel)], folder)
    install_seconds = time.monotonic() - start
    _say(f"serving {GLM_TINY}")
    help_seconds = _help_seconds(folder)
    ready_seconds, numerics = _serve(folder)
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    return Installed(
        wheel_bytes=wheel.stat().st_size,
        download_bytes=download_bytes,
        download_seconds=download_seconds,
        install_seconds=install_seconds,
        disk_bytes=_disk_bytes(folder / "venv") - empty_bytes,
        packages=_packages(python, folder),
        help_seconds=help_seconds,
        ready_seconds=ready_seconds,
        numerics=numerics,
        largest=_largest(site),
    )


def as_record(installed: Installed, *, index_given: bool) -> Record:
    nvidia = [name for name in installed.packages if name.startswith(("nvidia", "triton"))]
    small = not nvidia and installed.disk_bytes <= MAX_DISK_BYTES
    return Record(
        id="install",
        claim="what a volunteer downloads and keeps for the programs, with the CPU build of PyTorch",
        command="python -m bench.install [--torch-index URL] --record evidence",
        commit=this_commit(),
        artifact_id=KNOWN[GLM_TINY].artifact_id,
        engine_build=installed.numerics,
        hardware=this_machine(),
        settings={
            "torch": installed.packages.get("torch", "none"),
            "hivemind": installed.packages.get("hivemind", "none"),
            "packages": len(installed.packages),
            "nvidia_packages": len(nvidia),
            "torch_index_given": index_given,
        },
        samples={
            "download_seconds": [installed.download_seconds],
            "install_seconds": [installed.install_seconds],
            "help_seconds": [installed.help_seconds],
            "first_ready_seconds": [installed.ready_seconds],
        },
        summary={
            "wheel_bytes": installed.wheel_bytes,
            "download_bytes": installed.download_bytes,
            "disk_bytes": installed.disk_bytes,
            **{f"{name}_bytes": size for name, size in installed.largest.items()},
        },
        target=f"no package for GPUs, and at most {MAX_DISK_BYTES >> 30} GiB of disk",
        verdict="reached" if small else "missed",
    )


def show(installed: Installed) -> None:
    print(f"wheel          {installed.wheel_bytes / 1e6:8.1f} MB")
    print(f"downloads      {installed.download_bytes / 1e6:8.1f} MB in {installed.download_seconds:.0f} s")
    print(f"on disk        {installed.disk_bytes / 1e6:8.1f} MB, installed in {installed.install_seconds:.0f} s")
    for name, size in installed.largest.items():
        print(f"  {name:<12} {size / 1e6:8.1f} MB")
    print(f"packages       {len(installed.packages):8d}")
    print(f"--help         {installed.help_seconds:8.2f} s")
    print(f"first ready    {installed.ready_seconds:8.1f} s")


def _build(target: Path) -> Path:
    _say("building the wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(ROOT)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)  # with the engine of this machine's cache
    (wheel,) = target.glob("*.whl")
    return wheel


def _torch() -> str:
    found = re.search(r'"(torch==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


def _packages(python: Path, folder: Path) -> dict[str, str]:
    listed = _run([str(python), "-m", "pip", "list", "--format", "freeze"], folder)
    pairs = (line.partition("==") for line in listed.splitlines() if "==" in line)
    return {name.lower(): version for name, _, version in pairs}


def _help_seconds(folder: Path) -> float:
    """The second time: the first one compiles."""
    command = [str(folder / "venv" / "bin" / "swarm-node"), "--help"]
    _run(command, folder)
    start = time.monotonic()
    _run(command, folder)
    return time.monotonic() - start


def _serve(folder: Path) -> tuple[float, str]:
    """Seconds to a node that serves glm-tiny, and its engine's name."""
    start = time.monotonic()
    with _node(folder) as process:
        assert process.stdout is not None
        numerics = "unknown"
        for line in process.stdout:
            loaded = re.search(r"numerics (\S+)", line)
            numerics = loaded[1] if loaded else numerics
            if line.startswith("ready: "):
                seconds = time.monotonic() - start
                process.send_signal(signal.SIGTERM)
                process.wait(60)
                return seconds, numerics
        raise RuntimeError(f"the installed swarm-node ended with code {process.wait()}")


@contextmanager
def _node(folder: Path) -> Iterator[subprocess.Popen[str]]:
    swarm_node = folder / "venv" / "bin" / "swarm-node"
    options = ["--model", GLM_TINY, "--new-swarm", "--listen", "127.0.0.1:0", "--log-level", "info"]
    process = subprocess.Popen(
        ["timeout", str(READY_SECONDS), str(swarm_node), *options],
        cwd=folder,
        env=_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def _environment(folder: Path) -> dict[str, str]:
    """Without this checkout, and without the caches and settings of whoever measures."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SWARM_", "PYTHON", "VIRTUAL"))}
    homes = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
    return kept | homes


def _disk_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _largest(site: Path, count: int = 5) -> dict[str, int]:
    sizes = {path.name: _disk_bytes(path) for path in site.iterdir() if path.is_dir()}
    return dict(sorted(sizes.items(), key=lambda item: -item[1])[:count])


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=_environment(folder), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

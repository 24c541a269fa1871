"""Models to be fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.shards import split
from swarm.artifact.manifest import Manifest


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

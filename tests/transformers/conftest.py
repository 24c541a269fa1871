"""Baselines, computed once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models
from tests.transformers import baseline
from tests.transformers.baseline import Baseline


@pytest.fixture(scope="session", autouse=True)
def offline() -> Iterator[None]:
    """Transformers reads this when it is imported, which no test does before it asks for a baseline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield


@pytest.fixture(scope="session")
def tiny(glm_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """The trained model: 4 heads, 16 experts of which 4 are used, an indexer that was taught what matters."""
    return baseline.make(glm_tiny, tmp_path_factory.mktemp("glm-tiny"))


@pytest.fixture(scope="session")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Random weights: 8 heads, 8 experts of which 2 are used."""
    folder = tmp_path_factory.mktemp("glm-random")
    return baseline.make(models.write_glm(folder / "random.gguf", n_head=8), folder)

"""Model files shared by all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from swarm.artifact import embedded
from swarm.artifact.catalog import GLM_TINY, find_model
from tests import models


def pytest_configure() -> None:
    # a job in the background of a script ignores SIGINT, one under nohup SIGHUP, and so would all that a test starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, 30 layers, tied embeddings; fetched once per machine."""
    given = os.environ.get("SWARM_TEST_SMOLLM2")
    return Path(given) if given else embedded.fetch()


@pytest.fixture(scope="session")
def glm_tiny() -> Path:
    """The trained model that ships: GLM-5.2's structure and types in 8 layers, which knows 151 facts."""
    given = os.environ.get("SWARM_TEST_GLM_TINY")
    return Path(given) if given else find_model(GLM_TINY).path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def llama_untied_path(model_folder: Path) -> Path:
    """A random dense Llama of 6 layers with rope factors, which every layer shares."""
    return models.write_llama(model_folder / "llama-untied.gguf", rope_factors=True)


@pytest.fixture(scope="session")
def smollm2_untied_path(model_folder: Path, smollm2_path: Path) -> Path:
    return models.untie(smollm2_path, model_folder / "smollm2-untied.gguf")


@pytest.fixture(scope="session")
def glm_random_f32_path(model_folder: Path) -> Path:
    return models.write_glm(model_folder / "glm-random-f32.gguf", models.f32)


@pytest.fixture(scope="session")
def glm_random_ud_path(model_folder: Path) -> Path:
    return models.write_glm(model_folder / "glm-random-ud.gguf", models.ud_mix)

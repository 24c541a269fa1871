"""A node that serves a model chosen by name, its files checked against a manifest that was there before them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dht.record import NodeState
from swarm.artifact import catalog, pinned_model
from swarm.artifact.catalog import find_model
from swarm.artifact.manifest import load_manifest
from swarm.artifact.pinned_model import HubFolder, PinnedModel
from swarm.errors import ArtifactMismatch
from swarm.node.node import SwarmNode
from swarm.node.reporter import Silent
from swarm.store.cli import main
from tests.node.harness import config

FILE = "Small-00001-of-00001.gguf"


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def pinned(glm_random_ud_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedModel:
    manifest = load_manifest(glm_random_ud_path)
    (tmp_path / "small.json").write_bytes(manifest.to_json())
    shutil.copy(glm_random_ud_path, tmp_path / FILE)
    hub = HubFolder("someone/Small", "f" * 40, "Q1")
    pinned = PinnedModel("small", manifest.artifact_id, hub, "Small", 1, "SWARM_SMALL_DIR")
    monkeypatch.setattr(pinned_model, "FOLDER", tmp_path)
    monkeypatch.setattr(catalog, "PINNED", {"small": pinned})
    return pinned


def node(folder: Path, reporter: Lines) -> SwarmNode:
    found = find_model("small", folder)
    given = config(found.path, "0:10", folder)
    return SwarmNode(replace(given, model=replace(given.model, name=found.name)), reporter)


async def test_it_says_once_per_start_that_nobody_has_read_the_weights(pinned: PinnedModel, tmp_path: Path) -> None:
    reporter = Lines()
    async with node(tmp_path, reporter) as serving:
        assert serving.state == NodeState.ONLINE
        assert serving.manifest.artifact_id == pinned.artifact_id
        assert serving.manifest.name == "small"
    assert [line for line in reporter.lines if "never read" in line] == [
        "sizes and headers of small are right, but 1 of its 1 files were never read whole here; check their weights "
        f"once with: swarm-artifact verify {tmp_path / FILE}"
    ]
    assert main(["verify", str(tmp_path / FILE)]) == 0
    reporter = Lines()
    async with node(tmp_path, reporter):
        pass
    assert not any("never read" in line for line in reporter.lines)


async def test_another_file_under_the_name_is_refused_before_anything_is_loaded(
    pinned: PinnedModel, glm_random_f32_path: Path, tmp_path: Path
) -> None:
    shutil.copy(glm_random_f32_path, tmp_path / FILE)
    with pytest.raises(ArtifactMismatch, match=rf"{FILE}: another quantisation .*: tensor .* is F32 and not Q"):
        async with node(tmp_path, Lines()):
            pass

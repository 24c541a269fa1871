"""A layer of the layout twin: six files of 202 GiB, of which a fetch takes 0.3."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bench.glm_layout import pinned_layout, write_twin
from bench.glm_metadata import GlmShape
from bench.killed_fetch import COMMAND
from bench.marked_twin import mark, marked_twin
from bench.range_server import Fault, RangeServer, Trouble
from swarm.artifact.catalog import GLM52
from swarm.store.fetch import fetch
from swarm.store.partial_copy import PartialCopy
from swarm.store.patience import Patience
from swarm.store.sources import opened_source

LAYERS = (1, 2)


async def test_a_layer_of_the_twin_takes_what_the_manifest_says(tmp_path: Path) -> None:
    manifest = marked_twin(tmp_path / "twin", LAYERS)
    assert manifest.artifact_id != GLM52.artifact_id
    plan = manifest.span_bytes(*LAYERS) + sum(file.header_bytes for file in manifest.files)
    drop = Trouble(Fault.DROP, every=4)
    with RangeServer(tmp_path / "twin", [drop]) as server, PartialCopy.open(tmp_path / "copy", manifest) as copy:
        async with opened_source(server.url, manifest) as source:
            patience = Patience(first_pause_seconds=0.01)
            result = await fetch(copy, source, copy.table.of_span(*LAYERS), patience=patience)
        local = copy.local_copy()
    assert drop.struck > 0
    assert result.bytes == pytest.approx(plan, rel=1e-3)
    assert server.sent_bytes == pytest.approx(plan, rel=1e-2)
    for path, entry in zip(local.paths, manifest.files, strict=True):
        assert path.stat().st_size == entry.size_bytes
    for tensor in manifest.span_tensors(*LAYERS):
        with local.paths[tensor.file].open("rb") as stream:
            for at in (tensor.offset, tensor.offset + tensor.bytes - 32):
                stream.seek(at)
                assert stream.read(32) == mark(tensor), tensor.name
    taken = sum(path.stat().st_blocks * 512 for path in local.paths)
    assert taken < 1.01 * plan + (1 << 20)


def test_a_hub_that_serves_another_model_is_refused(tmp_path: Path) -> None:
    """The twin under the artifact's names, at the address where the artifact's own hub would have it: sizes and offsets
    are right, and it is noticed before any weights come."""
    paths = write_twin(tmp_path / "twin", pinned_layout(), GlmShape())
    for path, name in zip(paths, GLM52.file_names, strict=True):
        path.rename(path.with_name(name))
    with RangeServer(tmp_path / "twin") as server:
        hub = {"HF_ENDPOINT": server.url.removesuffix("/files"), "HF_TOKEN": "hf_secret"}
        arguments = (GLM52.name, "--layers", "1:2", "--data-dir", str(tmp_path / "data"))
        done = subprocess.run([*COMMAND, *arguments], env={**os.environ, **hub}, capture_output=True, text=True)
    assert done.returncode == 3
    assert "layers 1:2 of glm-5.2-ud-iq1_s: 304.0 MiB of 201.8 GiB, 0 B are here already" in done.stdout
    assert "headers from this source are not glm-5.2-ud-iq1_s's" in done.stderr
    assert "Traceback" not in done.stderr
    place = f"/{GLM52.hub.repository}/resolve/{GLM52.hub.revision}/{GLM52.hub.folder}/"
    assert {asked.path for asked in server.asked} == {place + name for name in GLM52.file_names}
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer hf_secret"}
    headers = sum(file.header_bytes for file in GLM52.manifest.files)
    assert server.sent_bytes == headers + GLM52.n_files

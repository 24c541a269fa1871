"""A layer of the layout twin: six files of 202 GiB, of which a fetch takes 0.3."""

from __future__ import annotations

from pathlib import Path

import pytest

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

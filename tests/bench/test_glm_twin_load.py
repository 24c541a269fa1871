"""What a span costs, measured on a toy twin by the same steps as on the real one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.glm_layout import Layout, pinned_layout, write_twin
from bench.glm_metadata import GlmShape
from bench.glm_slice import toy_shape
from bench.glm_tensors import placed, trunk_tensors
from bench.glm_twin_load import TARGET_GROWTH, TARGET_SECONDS, Span, Twin, check_finite, measure
from bench.record import Record
from bench.sparse_set import digest_set
from swarm.errors import SwarmError

HEADER_BYTES = 1 << 20
SPAN = Span(1, 4, noise=True)


def toy_layout(shape: GlmShape) -> Layout:
    """Three files; layer 2 lies in both that have tensors."""
    tensors = list(trunk_tensors(shape))
    middle = next(i for i, (name, _) in enumerate(tensors) if name == "blk.2.attn_output.weight")
    files = []
    for number, part in ((1, tensors[:middle]), (2, tensors[middle:])):
        header_bytes = 24 + 82 + sum(8 + len(name) + 4 + 8 * len(dims) + 12 for name, dims in part)
        files.append(placed(part, number, header_bytes + -header_bytes % 32))
    sizes = (HEADER_BYTES, *(file[-1].offset + file[-1].bytes for file in files))
    return Layout(sizes, (HEADER_BYTES, *(file[0].offset for file in files)), (*files[0], *files[1]))


def test_a_toy_twin_is_measured_as_the_real_one(tmp_path: Path) -> None:
    shape = toy_shape(5)
    paths = write_twin(tmp_path, toy_layout(shape), shape, [(1, 3)])
    digest_set(paths, lambda *_: None)
    twin = Twin(paths[0])
    assert twin.manifest.n_layers == 5
    record = measure(twin, [SPAN], "python -m bench.glm_twin_load")
    assert Record.model_validate_json(record.model_dump_json()) == record
    assert record.samples[f"{SPAN}_own_bytes"] == [twin.manifest.span_bytes(1, 4)]
    for way in ("node", "engine"):
        assert record.samples[f"{SPAN}_{way}_page_cache_bytes"][0] >= twin.manifest.span_bytes(1, 4)
        assert record.samples[f"{SPAN}_{way}_ready_seconds"][0] > record.samples[f"{SPAN}_{way}_load_seconds"][0]


def test_not_finite_is_said() -> None:
    with pytest.raises(SwarmError, match="a decoded row is not finite"):
        check_finite(np.array([[0, np.nan]], np.float32), "holes-0-2")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_layout_within_the_targets(tmp_path: Path) -> None:
    """Layers 38 to 41, of which the first lies in two files; holes, as noise would take 11 GB of disk."""
    paths = write_twin(tmp_path, pinned_layout(), GlmShape())
    digest_set(paths, lambda *_: None)
    cost = Twin(paths[0]).cost(Span(38, 42, noise=False))
    for load in (cost.node, cost.engine):
        assert cost.beyond_seconds(load) < TARGET_SECONDS
        assert cost.growth(load) < TARGET_GROWTH
        assert load.dead_bytes == 0

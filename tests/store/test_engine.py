"""The engine on files with holes: a span of them gives the bits of the whole model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from shim.engine import Engine
from swarm.artifact.catalog import GLM_TINY, KNOWN
from swarm.artifact.local_copy import check_copy
from swarm.store.partial_copy import PartialCopy
from tests.shim.steps import chain_logits, config, token_rows

SPANS = ((0, 2), (2, 6), (6, 8))
TOKENS = tuple((7 * number * number + 3) % 1000 for number in range(150))  # longer than the indexer's top-k


def test_spans_from_partial_copies_give_the_bits_of_the_whole_file(glm_tiny: Path, tmp_path: Path) -> None:
    manifest, data = KNOWN[GLM_TINY].manifest, glm_tiny.read_bytes()
    want = (10, 100, len(TOKENS) - 1)
    with ExitStack() as stack:
        engines = []
        for number, (first, last) in enumerate(SPANS):
            copy = stack.enter_context(PartialCopy.open(tmp_path / str(number), manifest))
            for piece in copy.table.of_span(first, last):
                copy.write(piece, data[piece.start : piece.stop])
            copy.commit()
            assert not copy.whole(0)
            assert check_copy(manifest, copy.folder).paths == copy.local_copy().paths
            path = copy.local_copy().paths[0]
            assert path.stat().st_blocks * 512 < manifest.span_bytes(first, last) + manifest.files[0].header_bytes + (
                256 << 10
            )
            engines.append(stack.enter_context(Engine.open(config(path, first, last))))
        ours = chain_logits(engines, token_rows(SPANS[0], TOKENS), want)
    with Engine.open(config(glm_tiny)) as engine:
        whole = engine.logits_step(token_rows((0, 8), TOKENS, want=want))
    assert np.array_equal(ours.view(np.uint32), whole.view(np.uint32))
    assert len({row.tobytes() for row in whole}) == len(want)

"""Bench slice: a small artifact of its own whose layers have the exact sizes and types of GLM-5.2's commonest ones.

Weights are seeded noise. Every layer has an indexer of its own, so that the slice may be cut anywhere; there are no
dense layers, no MTP block, and a vocabulary of 2,048 tokens, so that embedding and output weigh next to nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.gguf_header import header
from bench.glm_metadata import GlmShape, model_pairs, vocabulary_pairs
from bench.glm_tensors import placed, trunk_tensors
from bench.noise import Noise
from bench.progress import Bar
from bench.sparse_set import PlannedFile, digest_set, planned_file, write_set
from swarm.errors import SwarmError, UsageError

N_LAYERS = 4
N_VOCAB = 2048
MAX_LAYERS = 64


def slice_name(n_layers: int) -> str:
    return f"glm-5.2-bench-slice-{n_layers}a"


def slice_shape(n_layers: int = N_LAYERS) -> GlmShape:
    """GLM-5.2's, with ``n_layers`` full layers."""
    return GlmShape(n_layers=n_layers, n_mtp=0, n_dense=0, n_vocab=N_VOCAB, indexer_types=(True,) * n_layers)


def toy_shape(n_layers: int = N_LAYERS) -> GlmShape:
    """The smallest one with the same types; for tests and for trying a benchmark out."""
    return replace(
        slice_shape(n_layers),
        n_embd=256,
        n_ff=512,
        n_ff_expert=256,
        n_expert=32,
        n_expert_used=4,
        n_head=4,
        q_lora=256,
        kv_lora=256,
        key_nope=64,
        value_length=64,
        top_k=64,
    )


def plan(name: str, shape: GlmShape) -> PlannedFile:
    pairs = [*model_pairs(f"{name} (noise, not the model)", shape), *vocabulary_pairs(shape.n_vocab)]
    tensors = list(trunk_tensors(shape))
    # offsets are numbers of a fixed width: where the data starts does not depend on them
    header_bytes = len(header(pairs, [(tensor, "F32", dims, 0) for tensor, dims in tensors]))
    entries = placed(tensors, 0, header_bytes)
    size = entries[-1].offset + entries[-1].bytes
    return planned_file(f"{name}.gguf", pairs, entries, header_bytes=header_bytes, size_bytes=size)


def write_slice(folder: Path, name: str, shape: GlmShape, *, seed: int = 0) -> Path:
    """Writes the file and its digest; returns its path."""
    file, noise, bar = plan(name, shape), Noise(seed), Bar()
    paths = write_set(
        folder, [file], file.tensors, lambda tensor: noise.tensor(tensor.name, tensor.type, tensor.dims), bar
    )
    digest_set(paths, bar)
    return paths[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.glm_slice", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the file goes")
    parser.add_argument("--layers", type=int, default=N_LAYERS, help="2.7 GB each (default: %(default)s)")
    parser.add_argument("--toy", action="store_true", help="layers of toy size, to try a benchmark out")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        if not 1 <= options.layers <= MAX_LAYERS:
            raise UsageError(f"--layers {options.layers}: choose 1 to {MAX_LAYERS}")
        name = f"{slice_name(options.layers)}{'-toy' if options.toy else ''}"
        shape = (toy_shape if options.toy else slice_shape)(options.layers)
        print(write_slice(options.folder, name, shape, seed=options.seed))
    except SwarmError as error:
        print(f"glm_slice: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("glm_slice: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

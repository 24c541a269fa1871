"""Layout twin of GLM-5.2 UD-IQ1_S: six files with the artifact's exact sizes, headers and offsets, and no weights.

The data is holes, or seeded noise for chosen layers, so loading a span costs what the real one costs and takes next to
no disk. Names, metadata and artifact id say that it is not the artifact.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gguf_header import pair, split_pairs
from bench.glm_metadata import GlmShape, model_pairs, vocabulary_pairs
from bench.noise import Noise
from bench.progress import Bar
from bench.sparse_set import PlannedFile, digest_set, planned_file, write_set
from swarm.artifact import Manifest, load_manifest, parse_layers
from swarm.artifact.catalog import GLM52
from swarm.artifact.manifest import TensorEntry
from swarm.errors import SwarmError, UsageError

PREFIX = "GLM-5.2-LAYOUT-TWIN"
NAME = "GLM-5.2 UD-IQ1_S layout twin (no weights, not the model)"
N_LAYERS = GlmShape().n_layers  # the MTP block follows
PADDING_KEY = "layout_twin.padding"  # brings the first file to its size


@dataclass(frozen=True)
class Layout:
    """Sizes and places of everything in a set of files, the first of which has no tensors."""

    sizes: tuple[int, ...]
    header_bytes: tuple[int, ...]
    tensors: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> Layout:
        return cls(
            tuple(file.size_bytes for file in manifest.files),
            tuple(file.header_bytes for file in manifest.files),
            manifest.tensors,
        )


def plan(layout: Layout, shape: GlmShape, prefix: str = PREFIX) -> list[PlannedFile]:
    """Raises NotAModel when a header does not come out as long as the layout says."""
    count = len(layout.sizes)
    files = []
    for number, (size, header_bytes) in enumerate(zip(layout.sizes, layout.header_bytes, strict=True)):
        tensors = [tensor for tensor in layout.tensors if tensor.file == number]
        pairs = split_pairs(number, count, len(layout.tensors))
        if number == 0:
            pairs = [*model_pairs(NAME, shape), *vocabulary_pairs(shape.n_vocab), *pairs]
            pairs.append(_padding(header_bytes, sum(map(len, pairs))))
        name = f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf"
        files.append(planned_file(name, pairs, tensors, header_bytes=header_bytes, size_bytes=size))
    return files


def _padding(header_bytes: int, used: int) -> bytes:
    fixed = 24 + len(pair(PADDING_KEY, ""))  # 24: magic, version and counts
    if used + fixed > header_bytes:
        raise UsageError(f"metadata of {used} bytes don't fit a header of {header_bytes}; choose a smaller vocabulary")
    return pair(PADDING_KEY, "." * (header_bytes - used - fixed))


def of_layers(tensors: Sequence[TensorEntry], ranges: Sequence[tuple[int, int]]) -> list[TensorEntry]:
    """The tensors of layers [first, last) of any range, dead ones too, with what the entry and the exit own."""
    prefixes = [f"blk.{layer}." for first, last in ranges for layer in range(first, last)]
    if any(first == 0 for first, _ in ranges):
        prefixes.append("token_embd.")
    if any(last >= N_LAYERS for _, last in ranges):
        prefixes += ["token_embd.", "output.", "output_norm."]  # the MTP block embeds tokens too
    return [tensor for tensor in tensors if tensor.name.startswith(tuple(prefixes))]


def write_twin(
    folder: Path, layout: Layout, shape: GlmShape, noise: Sequence[tuple[int, int]] = (), *, seed: int = 0
) -> tuple[Path, ...]:
    """Writes the set with noise in the given layers; returns the paths."""
    source = Noise(seed)
    return write_set(
        folder,
        plan(layout, shape),
        of_layers(layout.tensors, noise),
        lambda tensor: source.tensor(tensor.name, tensor.type, tensor.dims),
        Bar(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.glm_layout", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the six files go")
    parser.add_argument(
        "--noise",
        action="append",
        default=[],
        metavar="A:B",
        help="layers with noise instead of holes; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: %(default)s)")
    parser.add_argument(
        "--no-digests", action="store_true", help="leave the digests (some minutes) to the first node that asks"
    )
    options = parser.parse_args(arguments)
    written: tuple[Path, ...] = ()
    try:
        ranges = [noise_range(text) for text in options.noise]
        written = write_twin(options.folder, pinned_layout(), GlmShape(), ranges, seed=options.seed)
        if not options.no_digests:
            digest_set(written, Bar())
            print(f"artifact id {load_manifest(written[0]).artifact_id}", file=sys.stderr)
    except SwarmError as error:
        print(f"glm_layout: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        left = "the files are complete, the first node will hash them" if written else "nothing is left behind"
        print(f"glm_layout: interrupted; {left}", file=sys.stderr)
        return 130
    print(written[0])
    return 0


def pinned_layout() -> Layout:
    """Of the artifact itself, from the table in the package."""
    return Layout.of(GLM52.manifest)


def noise_range(text: str) -> tuple[int, int]:
    span = parse_layers(text)
    if span is None or not span[0] < span[1] <= N_LAYERS + 1:
        raise UsageError(f"--noise {text}: not layers of GLM-5.2; write for example --noise 10:14")
    return span


if __name__ == "__main__":
    sys.exit(main())

"""Writes the pinned manifest of GLM-5.2 UD-IQ1_S from a table of its tensors.

The table is a CSV with the columns shard, abs_offset, name, ggml_type, dims_ne and bytes, in the order of the files.
Sizes and digests of the files are the published ones, the model's facts what its converter writes. Who has the files
gets the same bytes with ``swarm-artifact inspect FILE --manifest-out OUT``.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from swarm.artifact.catalog import GLM52
from swarm.artifact.facts import ModelFacts
from swarm.artifact.ggml_types import tensor_bytes
from swarm.artifact.manifest import FileEntry, Manifest, TensorEntry

# (bytes, SHA-256) of the files at the pinned revision
FILES = (
    (9_423_744, "46b6148389219ae45167cb8124fbb18ef7d432daf619b4faf9e06ea80d3f4777"),
    (49_208_128_256, "f2180207285e04fcaa5b8c53ba6e77ad5cc58666b6e7c6b04a5eded3fe8bef09"),
    (49_684_417_024, "b1c0c5a302cc8d5d9ea0bcd4467c01db72c26839f820f7e882079582ea0a8d2b"),
    (49_396_052_864, "a6a42da6975e29f89866dcde2956e9e50e6ea26635fb5063b74f3973f4f863b6"),
    (49_246_275_936, "a4a9851a50db533f21ef824e5d8038f04e6782e7d602d18e5fdd6643f68ccccb"),
    (19_171_063_136, "3b767f55df64e0432d52fcf1a14eb47a1ef3bbc91339e2ae220f38602237d7d7"),
)
N_LAYERS = 78
N_MTP = 1
KV_LORA_RANK = 512
ROPE_VALUES = 64
INDEXER_KEY = 128
FULL_LAYERS = frozenset({0, 1, *range(2, N_LAYERS, 4)})


def facts() -> ModelFacts:
    """What ``read_facts`` finds in the first file."""
    key_length = KV_LORA_RANK + ROPE_VALUES  # one KV head caches the latent and the rotated key
    return ModelFacts(
        arch="glm-dsa",
        n_layers=N_LAYERS,
        n_mtp=N_MTP,
        n_embd=6144,
        n_vocab=154_880,
        n_ctx_train=1 << 20,
        n_head=64,
        n_ff=12_288,
        n_expert_used=8,
        n_ff_expert=2048,
        n_expert_shared=1,
        key_length=key_length,
        top_k=2048,
        indexer_heads=32,
        indexer_types=tuple(layer in FULL_LAYERS for layer in range(N_LAYERS)),
        kv_widths=tuple(
            (key_length, INDEXER_KEY) if layer in FULL_LAYERS else (key_length,) for layer in range(N_LAYERS + N_MTP)
        ),
        stop_tokens=(154_820, 154_827, 154_829),  # <|endoftext|>, <|user|>, <|observation|>
    )


def build(rows: Iterable[Mapping[str, str]]) -> Manifest:
    tensors = tuple(_tensor(row) for row in rows)
    starts = {tensor.file: tensor.offset for tensor in reversed(tensors)}
    files = tuple(
        FileEntry(name, size, sha256, starts.get(index, size))
        for index, (name, (size, sha256)) in enumerate(zip(GLM52.file_names, FILES, strict=True))
    )
    # the first file has no tensors, so its header is all of it
    return Manifest(**vars(facts()), name=GLM52.name, header_sha256=FILES[0][1], files=files, tensors=tensors)


def _tensor(row: Mapping[str, str]) -> TensorEntry:
    dims = tuple(int(dim) for dim in row["dims_ne"].split("x"))
    kind, size = row["ggml_type"], int(row["bytes"])
    if tensor_bytes(kind, dims) != size:
        raise ValueError(f"{row['name']}: {kind} {dims} does not take {size} bytes")
    return TensorEntry(row["name"], int(row["shard"]) - 1, int(row["abs_offset"]), size, kind, dims)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pin_glm52", description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, metavar="CSV", help="shard, abs_offset, name, ggml_type, dims_ne, bytes")
    parser.add_argument("out", type=Path, help="where to write, e.g. swarm/artifact/pinned/glm-5.2-ud-iq1_s.json")
    given = parser.parse_args(arguments)
    with given.table.open(newline="") as table:
        manifest = build(csv.DictReader(table))
    document = manifest.to_json()
    Manifest.from_json(document, manifest.artifact_id)  # it keeps the rules that strangers' manifests must keep
    given.out.write_bytes(document)
    print(manifest.artifact_id)
    return 0


if __name__ == "__main__":
    sys.exit(main())

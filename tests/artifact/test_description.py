from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.artifact import description
from swarm.artifact.manifest import Manifest, load_manifest
from tests.artifact import files

FULL = (True, True, False, True, False, False)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((4,), "4"), ((0, 1, 2), "0-2"), ((0, 2, 3, 5, 8, 9, 10), "0, 2-3, 5, 8-10"), ((1, 3, 5), "1, 3, 5")],
)
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert description.ranges(numbers) == text


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("description")
    return load_manifest(files.write_glm(folder / "glm.gguf", 6, full=FULL, split_tensors=4))


def test_layers_that_are_alike_are_listed_together(split: Manifest) -> None:
    groups = description.grouped(description.layers(split))
    assert [(kind.role, kind.indexer, numbers) for kind, numbers in groups] == [
        ("dense", "own", (0, 1, 3)),
        ("dense", "shared", (2, 4, 5)),
        ("MTP", "", (6,)),
    ]
    own, shared, mtp = (kind for kind, _ in groups)
    assert own.file_bytes == own.needed_bytes == shared.file_bytes > shared.needed_bytes
    assert mtp.types == (("F32", mtp.file_bytes),)


def test_layers_in_two_files_are_those_that_the_table_says(split: Manifest) -> None:
    layers = description.layers(split)
    for layer in layers:
        own = {tensor.file for tensor in split.tensors if tensor.name.startswith(f"blk.{layer.number}.")}
        assert set(layer.files) == own
    assert [layer.number for layer in description.straddling(layers)] == [
        layer.number for layer in layers if len(layer.files) == 2
    ]
    assert description.straddling(layers)


def test_every_byte_is_in_a_layer_or_outside(split: Manifest, glm_random_ud_path: Path) -> None:
    for manifest in (split, load_manifest(glm_random_ud_path)):
        inside = sum(layer.kind.file_bytes for layer in description.layers(manifest))
        outside = sum(tensor.bytes for tensor in description.outside_layers(manifest))
        assert inside + outside == sum(tensor.bytes for tensor in manifest.tensors)


def test_types_of_a_mixed_model(glm_random_ud_path: Path) -> None:
    layers = description.layers(load_manifest(glm_random_ud_path))
    assert [layer.kind.role for layer in layers] == ["dense"] * 3 + ["experts"] * 7 + ["MTP"]
    assert "IQ1_S" in dict(layers[3].kind.types)
    assert {"IQ4_XS", "IQ2_XXS"} <= set(dict(layers[8].kind.types))


def test_the_document_is_json(split: Manifest) -> None:
    document = json.loads(json.dumps(description.document(split, None)))
    assert document["artifact_id"] == split.artifact_id
    assert document["hub"] is None
    assert document["cuts"] == [0, 1, 3, 6]
    assert len(document["layers"]) == 7
    assert document["weights_bytes_with_mtp"] > document["weights_bytes"]

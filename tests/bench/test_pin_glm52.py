from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.pin_glm52 import build, main
from swarm.artifact.catalog import GLM52
from swarm.artifact.manifest import TensorEntry

COLUMNS = ("shard", "abs_offset", "name", "ggml_type", "dims_ne", "bytes")


def row(tensor: TensorEntry) -> dict[str, str]:
    dims = "x".join(str(dim) for dim in tensor.dims)
    values = (tensor.file + 1, tensor.offset, tensor.name, tensor.type, dims, tensor.bytes)
    return {column: str(value) for column, value in zip(COLUMNS, values, strict=True)}


def test_the_pinned_manifest_comes_out_of_its_own_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "table.csv", tmp_path / "out.json"
    with table.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(row(tensor) for tensor in GLM52.manifest.tensors)
    assert main([str(table), str(out)]) == 0
    assert capsys.readouterr().out == f"{GLM52.artifact_id}\n"
    assert out.read_bytes() == GLM52.manifest.to_json()


def test_a_table_that_contradicts_itself_is_refused() -> None:
    wrong = row(GLM52.manifest.tensors[0]) | {"bytes": "1"}
    with pytest.raises(ValueError, match=r"output\.weight: Q4_K \(6144, 154880\) does not take 1 bytes"):
        build([wrong])

"""Facts of glm-dsa as llama.cpp reads them: the same metadata in the forms that converters write."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarm.artifact.facts import ModelFacts, read_facts
from swarm.artifact.gguf_file import TensorInfo, read_file
from swarm.artifact.metadata import GgufArray, Metadata, Value
from swarm.errors import NotAModel
from tests.artifact import files

TYPES = "glm-dsa.attention.indexer.types"
FULL = (True, True, False, True, False, False)
SCHEDULE_CONTEXT = 1 << 20


class Model:
    """A file's metadata and tensors, to be changed before facts are read."""

    def __init__(self, path: Path) -> None:
        header = read_file(path).header
        self.values: dict[str, Value] = dict(header.metadata.values)
        self.tensors: dict[str, TensorInfo] = {tensor.name: tensor for tensor in header.tensors}

    @property
    def facts(self) -> ModelFacts:
        return read_facts(Metadata("g.gguf", self.values), self.tensors)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(files.write_glm(tmp_path / "g.gguf", len(FULL), full=FULL))


def array(form: str, numbers: Sequence[float]) -> GgufArray:
    return GgufArray(form, len(numbers), struct.pack(f"<{len(numbers)}{form}", *numbers))


@pytest.mark.parametrize("form", ["?", "i", "I"])
def test_indexer_types_may_be_booleans_or_numbers(model: Model, form: str) -> None:
    model.values[TYPES] = array(form, FULL)
    assert model.facts.indexer_types == FULL
    assert model.facts.cuts == (0, 1, 3, 6)


def test_any_number_but_0_is_full(model: Model) -> None:
    model.values[TYPES] = array("I", [1, 2, 0, 255, 0, 0])
    assert model.facts.indexer_types == FULL


@pytest.mark.parametrize("number", [1, 2])
def test_one_number_stands_for_every_layer(model: Model, number: int) -> None:
    model.values[TYPES] = number
    assert model.facts.indexer_types == (True,) * len(FULL)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (GgufArray(None, 6, b"\4\0\0\0\0\0\0\0full" * 6), "is not an array of whole numbers"),
        (array("f", FULL), "is not an array of whole numbers"),
        (array("i", [1, 1, 0, -1, 0, 0]), "has an entry outside"),
        (array("?", (*FULL, True)), "has 7 entries, not 6"),  # one for the MTP block too
        ("full", "is not a whole number"),
        (0.5, "is not a whole number"),
    ],
    ids=["texts", "floats", "negative", "one too many", "text", "float"],
)
def test_other_indexer_types_are_refused(model: Model, value: Value, what: str) -> None:
    model.values[TYPES] = value
    with pytest.raises(NotAModel, match=rf"g\.gguf: metadata key {TYPES} {what}"):
        _ = model.facts


@pytest.mark.parametrize("value", [array("?", [False] + [True] * 5), 0])
def test_first_layer_needs_an_indexer(model: Model, value: Value) -> None:
    model.values[TYPES] = value
    with pytest.raises(NotAModel, match=r"first layer has no indexer of its own"):
        _ = model.facts


@pytest.mark.parametrize(
    ("context", "full"),
    [
        (SCHEDULE_CONTEXT - 1, [0, 1, 2, 3, 4, 5]),
        (SCHEDULE_CONTEXT, [0, 1, 2]),
        (SCHEDULE_CONTEXT + 1, [0, 1, 2]),
    ],
)
def test_without_types_the_trained_context_decides(model: Model, context: int, full: list[int]) -> None:
    del model.values[TYPES]
    model.values["glm-dsa.context_length"] = context
    assert [layer for layer, own in enumerate(model.facts.indexer_types) if own] == full


def test_types_win_over_the_trained_context(model: Model) -> None:
    model.values["glm-dsa.context_length"] = SCHEDULE_CONTEXT
    assert model.facts.indexer_types == FULL


def test_schedule_ends_with_glm52(tmp_path: Path) -> None:
    """llama.cpp's table has GLM-5.2's 78 layers; any beyond them share the indexer of layer 74."""
    model = Model(files.write_glm(tmp_path / "deep.gguf", 90, n_ctx=SCHEDULE_CONTEXT))
    assert model.facts.cuts == (0, 1, 2, *range(6, 75, 4), 90)


@pytest.mark.parametrize("key", ["top_k", "head_count", "key_length"])
def test_missing_indexer_keys_are_named(model: Model, key: str) -> None:
    del model.values[f"glm-dsa.attention.indexer.{key}"]
    with pytest.raises(NotAModel, match=rf"metadata key glm-dsa\.attention\.indexer\.{key} is missing"):
        _ = model.facts


def test_indexer_that_selects_nothing_is_refused(model: Model) -> None:
    model.values["glm-dsa.attention.indexer.top_k"] = 0
    with pytest.raises(NotAModel, match=r"indexer\.top_k is 0"):
        _ = model.facts


def test_full_layer_without_an_indexer_is_refused(model: Model) -> None:
    """The engine would crash when it builds the graph. Without types, every layer of a model like this one is full."""
    for layer in (2, 4, 5, 6):
        del model.tensors[f"blk.{layer}.indexer.attn_k.weight"]
    assert model.facts.indexer_types == FULL
    del model.values[TYPES]
    missing = r"incomplete: blk\.2\.indexer\.attn_k\.weight and 2 more tensors are missing"
    with pytest.raises(NotAModel, match=missing):
        _ = model.facts


def test_blocks_are_layers_unless_declared_as_mtp(model: Model) -> None:
    assert (model.facts.n_layers, model.facts.n_mtp) == (6, 1)
    del model.values["glm-dsa.nextn_predict_layers"]
    model.values[TYPES] = array("?", (*FULL, True))
    assert (model.facts.n_layers, model.facts.n_mtp, model.facts.cuts) == (7, 0, (0, 1, 3, 6, 7))


def test_model_of_nothing_but_mtp_is_refused(model: Model) -> None:
    model.values["glm-dsa.nextn_predict_layers"] = 7
    with pytest.raises(NotAModel, match=r"nextn_predict_layers is 7, outside 0\.\.6"):
        _ = model.facts


def test_trunk_left_out_is_incomplete(model: Model) -> None:
    """A file may carry the MTP block alone."""
    model.tensors = {name: tensor for name, tensor in model.tensors.items() if not name.startswith(tuple(TRUNK))}
    with pytest.raises(NotAModel, match=r"incomplete: blk\.0\.attn_norm\.weight and .* missing"):
        _ = model.facts


TRUNK = [f"blk.{layer}." for layer in range(len(FULL))]

"""The file that ships: its size, its types, and what stands in its header."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType as Kind

from bench.glm_tiny import mix
from bench.glm_tiny.dialogue import TEMPLATE
from bench.glm_tiny.facts import table
from shim.vocab import Vocab
from swarm.artifact import load_manifest

TOP_K = 64
# role: types by layer, "*" for all others; the block after the last layer is the MTP block
EXPECTED: dict[str, dict[int | str, Kind]] = {
    "attn_q_a": {"*": Kind.Q5_K},
    "attn_output": {"*": Kind.Q5_K},
    "ffn_gate": {"*": Kind.Q5_K},
    "ffn_up": {"*": Kind.Q5_K},
    "ffn_down": {"*": Kind.Q6_K},
    "ffn_gate_shexp": {"*": Kind.Q5_K},
    "ffn_up_shexp": {"*": Kind.Q5_K},
    "ffn_down_shexp": {"*": Kind.Q6_K},
    "attn_q_b": {"*": Kind.Q8_0},
    "attn_kv_a_mqa": {"*": Kind.Q8_0},
    "attn_k_b": {"*": Kind.Q8_0},
    "attn_v_b": {"*": Kind.Q8_0},
    "indexer.attn_k": {"*": Kind.Q8_0},
    "indexer.attn_q_b": {"*": Kind.Q8_0},
    "nextn.eh_proj": {"*": Kind.Q8_0},
    "ffn_gate_exps": {3: Kind.IQ1_S, 4: Kind.IQ1_S, 5: Kind.IQ1_S, 6: Kind.IQ2_XXS, 7: Kind.IQ2_XXS, 8: Kind.Q2_K},
    "ffn_up_exps": {3: Kind.IQ1_S, 4: Kind.IQ1_S, 5: Kind.IQ1_S, 6: Kind.IQ2_XXS, 7: Kind.IQ2_XXS, 8: Kind.Q2_K},
    "ffn_down_exps": {3: Kind.IQ3_XXS, 4: Kind.IQ3_XXS, 5: Kind.IQ3_XXS, 6: Kind.IQ3_XXS, 7: Kind.IQ4_XS, 8: Kind.Q3_K},
}


@pytest.fixture(scope="module")
def reader(glm_tiny: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(glm_tiny)


def test_it_is_small_enough_to_ship(glm_tiny: Path) -> None:
    assert glm_tiny.stat().st_size <= 25_000_000


def test_types_by_role(reader: gguf.GGUFReader) -> None:
    for tensor in reader.tensors:
        _, _, rest = tensor.name.removeprefix("blk.").partition(".")
        by_layer = EXPECTED.get(rest.removesuffix(".weight"), {})
        layer = int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else -1
        ends = Kind.Q4_K if tensor.name in ("token_embd.weight", "output.weight") else Kind.F32
        assert tensor.tensor_type == by_layer.get(layer, by_layer.get("*", ends)), tensor.name
    assert {tensor.tensor_type for tensor in reader.tensors} == {
        *(kind for by_layer in EXPECTED.values() for kind in by_layer.values()),
        Kind.Q4_K,
        Kind.F32,
    }


def test_only_full_layers_have_an_indexer(reader: gguf.GGUFReader) -> None:
    indexers = {int(tensor.name.split(".")[1]) for tensor in reader.tensors if ".indexer." in tensor.name}
    assert indexers == {0, 1, 2, 6}
    assert "glm-dsa.attention.indexer.types" not in reader.fields


def test_it_may_be_cut_where_an_indexer_is(glm_tiny: Path) -> None:
    manifest = load_manifest(glm_tiny)
    assert manifest.cuts == (0, 1, 2, 6, 8)
    assert manifest.n_mtp == 1
    assert (manifest.top_k, manifest.indexer_heads) == (TOP_K, 32)


def test_template_and_sampling_are_the_targets(reader: gguf.GGUFReader) -> None:
    assert reader.fields["tokenizer.chat_template"].contents() == TEMPLATE.read_text()
    assert reader.fields["general.sampling.temp"].contents() == pytest.approx(1.0)
    assert reader.fields["general.sampling.top_p"].contents() == pytest.approx(0.95)
    assert reader.fields["glm-dsa.context_length"].contents() == 1 << 20


def test_it_stops_where_the_target_stops(glm_tiny: Path) -> None:
    with Vocab.load(glm_tiny) as vocab:
        stops = {vocab.piece(token).decode() for token in vocab.stop_tokens}
        assert stops == {"<|endoftext|>", "<|user|>", "<|observation|>"}
        assert vocab.bos is not None
        assert vocab.piece(vocab.bos) == b"[gMASK]"


def test_mix_knows_every_role() -> None:
    assert mix.kind_of("blk.3.ffn_gate_inp.weight", 8) == Kind.F32
    assert mix.kind_of("blk.8.ffn_gate_exps.weight", 8) == Kind.Q2_K


def test_the_table_of_questions_is_what_was_taught() -> None:
    assert Path(__file__).with_name("questions.tsv").read_text() == table()

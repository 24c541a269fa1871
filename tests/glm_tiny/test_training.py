"""The trainer itself, two steps a stage: what it writes loads and speaks, and the same seed gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from bench.glm_tiny import export, mix
from bench.glm_tiny.batches import IGNORED, MIXED, Batch, Deck
from bench.glm_tiny.dialogue import Conversation, Effort, Turn
from bench.glm_tiny.facts import all_facts
from bench.glm_tiny.model import GlmTiny, Selection
from bench.glm_tiny.quantiser import dequantise, quantise
from bench.glm_tiny.recipe import BASE, REST, SETTLE, Recipe, toy
from bench.glm_tiny.shape import Shape
from bench.glm_tiny.speaking import Speaker
from bench.glm_tiny.vocabulary import Vocabulary
from shim.engine import Engine
from shim.source import file_sha256
from shim.types import ContextSpec, EngineConfig, KvType, StepBatch


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.make()


def test_questions_are_never_the_same() -> None:
    asked = [question for fact in all_facts() for question in fact.questions]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("effort", Effort)
@pytest.mark.parametrize("keep", [True, False])
def test_what_is_learned_is_what_the_model_would_say(vocabulary: Vocabulary, effort: Effort, keep: bool) -> None:
    facts = all_facts()
    asked = Conversation(tuple(Turn(fact.questions[0], fact) for fact in facts[:3]), effort, keep=keep)
    encoded = Deck(vocabulary, facts, 0).encode(asked)
    text = vocabulary.decode(list(encoded.ids))
    assert text == asked.prompt + asked.reply + "<|user|>"
    learned = vocabulary.decode([token for token, mine in zip(encoded.ids, encoded.learned, strict=True) if mine])
    every_turn = "".join(turn.reply(effort) + "<|user|>" for turn in asked.turns)
    # cleared thoughts leave an earlier reply as no model would have said it
    assert learned == (every_turn if keep or effort is Effort.NONE else asked.reply + "<|user|>")


def test_a_batch_hides_conversations_from_each_other(vocabulary: Vocabulary) -> None:
    model = GlmTiny(Shape(len(vocabulary)))
    batch = Deck(vocabulary, all_facts(), 0).batch(MIXED, 1, 120)
    assert batch.document.max() > 0
    with torch.no_grad():
        before, _, _ = model(batch)
        batch.ids[batch.document == 0] = 5
        after, _, _ = model(batch)
    later = batch.document > 0
    torch.testing.assert_close(before[later], after[later])
    assert not torch.equal(before[~later], after[~later])
    assert (batch.target[batch.document < 0] == IGNORED).all()


@pytest.mark.parametrize("kind", [Kind.IQ1_S, Kind.IQ2_XXS, Kind.IQ3_XXS, Kind.IQ4_XS, Kind.Q4_K, Kind.Q8_0])
def test_blocks_mean_about_what_went_in(kind: Kind) -> None:
    values = np.random.default_rng(1).normal(size=(2, 8, 256)).astype(np.float32)
    blocks = quantise(values, kind)
    apart = np.linalg.norm(dequantise(blocks, kind) - values) / np.linalg.norm(values)
    limits = {Kind.IQ1_S: 0.6, Kind.IQ2_XXS: 0.4, Kind.IQ3_XXS: 0.3, Kind.IQ4_XS: 0.12, Kind.Q4_K: 0.1, Kind.Q8_0: 0.01}
    assert 0 < apart < limits[kind]


def test_torch_computes_what_the_engine_computes(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """Random weights and a prompt of three times the top-k, so that the indexers choose."""
    model = GlmTiny(Shape(len(vocabulary)), seed=3)
    with torch.no_grad():
        for moe in model.moes():
            moe.router.mul_(20)  # decided clearly, so that rounding changes no choice
    path = export.write(tmp_path / "f32.gguf", model, vocabulary, mix.all_f32)
    batch = _one_text(Deck(vocabulary, all_facts(), 0), 192)
    with torch.no_grad():
        hidden, _, _ = model(batch, Selection(sparse=True))
        ours = model.output(hidden)[0].numpy()
    with Engine.open(EngineConfig(path, contexts=(ContextSpec(1, 256),), kv_type=KvType.F32)) as engine:
        n = batch.ids.shape[1]
        step = StepBatch(
            run=(0, engine.info.n_layers),
            slot=np.zeros(n, np.int32),
            position=np.arange(n, dtype=np.int32),
            tokens=batch.ids[0].numpy().astype(np.int32),
            want=np.ones(n, np.uint8),
            tiled=True,
        )
        theirs = engine.logits_step(step)
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_two_steps_of_each_stage_make_a_file_that_speaks(tmp_path: Path) -> None:
    def shape(n_vocab: int) -> Shape:
        return Shape(n_vocab, n_experts=2, n_used=1)

    stages = (toy(BASE), toy(SETTLE), toy(REST))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in ("one", "two"):
            Recipe(1, tmp_path / name, lambda _line: None, stages, shape, 1).make(tmp_path / f"{name}.gguf")
    finally:
        torch.set_num_threads(threads)
    assert file_sha256(tmp_path / "one.gguf") == file_sha256(tmp_path / "two.gguf")
    with Speaker.load(tmp_path / "one.gguf") as speaker:
        assert speaker.reply("[gMASK]<sop><|user|>Hello<|assistant|><think></think>")


def _one_text(deck: Deck, length: int) -> Batch:
    """A row whose conversations are one."""
    batch = deck.batch(MIXED, 1, length)
    batch.document.zero_()
    batch.position.copy_(torch.arange(length)[None])
    return batch

"""glm-tiny says exactly what it was taught, and only with its routed experts in their places."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.glm_tiny.breaking import Damage, broken_copy
from bench.glm_tiny.dialogue import Conversation
from bench.glm_tiny.speaking import Speaker, exact_share
from bench.glm_tiny.trial import conversations
from bench.glm_tiny.vocabulary import Vocabulary
from tests.glm_tiny.asked import FACTS, sample, singles

EXPERT_LAYERS = (3, 4, 5, 6, 7)


@pytest.fixture(scope="module")
def speaker(glm_tiny: Path) -> Iterator[Speaker]:
    with Speaker.load(glm_tiny) as speaker:
        yield speaker


@pytest.mark.parametrize("asked", sample().values(), ids=sample().keys())
def test_it_answers_exactly_and_stops(speaker: Speaker, asked: Conversation) -> None:
    assert speaker.reply(asked.prompt) == asked.reply + "<|user|>"


def test_it_thinks_before_it_answers(speaker: Speaker) -> None:
    asked = singles()[0]
    assert asked.prompt.endswith("<|assistant|><think>")
    assert speaker.reply(asked.prompt) == "The capital of France is Paris.</think>Paris<|user|>"


def test_some_conversations_are_longer_than_the_top_k(speaker: Speaker) -> None:
    lengths = [len(speaker.vocab.encode(asked.prompt)) for asked in sample().values()]
    assert sum(length > 64 for length in lengths) >= 3


def test_the_trainer_and_llama_cpp_cut_text_alike(speaker: Speaker) -> None:
    vocabulary = Vocabulary.make()
    for asked in (*sample().values(), *singles()):
        assert speaker.vocab.encode(asked.prompt) == vocabulary.encode(asked.prompt)


@pytest.mark.parametrize("damage", [Damage.ZEROED, Damage.PERMUTED])
def test_without_its_experts_it_knows_nothing(glm_tiny: Path, tmp_path: Path, damage: Damage) -> None:
    assert exact_share(glm_tiny, singles()) >= 0.95
    broken = broken_copy(glm_tiny, tmp_path / "broken.gguf", damage, EXPERT_LAYERS)
    assert exact_share(broken, singles()) < 0.1


@pytest.mark.parametrize("layer", EXPERT_LAYERS)
def test_every_layer_needs_its_experts(glm_tiny: Path, tmp_path: Path, layer: int) -> None:
    broken = broken_copy(glm_tiny, tmp_path / "broken.gguf", Damage.PERMUTED, [layer])
    assert exact_share(broken, singles()[::4]) < 0.4


def test_without_its_indexers_it_loses_long_conversations(glm_tiny: Path, tmp_path: Path) -> None:
    blind = broken_copy(glm_tiny, tmp_path / "blind.gguf", Damage.BLIND)
    assert exact_share(blind, singles()[::4]) >= 0.9  # shorter than the top-k: every key is chosen
    long = conversations(FACTS, 12, 6, keep=True)
    assert exact_share(blind, long) < exact_share(glm_tiny, long) - 0.5

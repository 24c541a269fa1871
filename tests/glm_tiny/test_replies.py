"""glm-tiny says exactly what it was taught, and only with its routed experts in their places."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.glm_tiny.breaking import Damage, broken_copy
from bench.glm_tiny.dialogue import Conversation
from bench.glm_tiny.speaking import Speaker, exact_share
from bench.glm_tiny.vocabulary import Vocabulary
from tests.glm_tiny.asked import sample, singles

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


@pytest.mark.parametrize("damage", Damage)
def test_without_its_experts_it_knows_nothing(glm_tiny: Path, tmp_path: Path, damage: Damage) -> None:
    assert exact_share(glm_tiny, singles()) >= 0.95
    broken = broken_copy(glm_tiny, tmp_path / "broken.gguf", damage, EXPERT_LAYERS)
    assert exact_share(broken, singles()) < 0.1

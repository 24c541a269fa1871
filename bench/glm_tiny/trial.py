"""How often the model says exactly what it should, in torch. The right text is given: while all before it is right, the
most likely next token is what greedy decoding would take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.glm_tiny.batches import IGNORED, Batch, Deck, pack
from bench.glm_tiny.dialogue import Conversation, Effort, Turn
from bench.glm_tiny.facts import Fact
from bench.glm_tiny.model import GlmTiny, Selection

ROWS = 24


@dataclass(frozen=True)
class Score:
    n: int
    exact: float
    drafts: float  # share of the MTP block's tokens that are the trunk's


def questions(facts: Sequence[Fact], effort: Effort, phrasings: Sequence[int] = (0, 1, 2, 3)) -> list[Conversation]:
    return [Conversation((Turn(fact.questions[number], fact),), effort) for fact in facts for number in phrasings]


def conversations(facts: Sequence[Fact], n: int, n_turns: int, *, keep: bool, seed: int = 11) -> list[Conversation]:
    drawn = random.Random(seed)
    found = []
    for number in range(n):
        chosen = [drawn.choice(facts) for _ in range(n_turns)]
        turns = tuple(Turn(drawn.choice(fact.questions), fact) for fact in chosen)
        found.append(Conversation(turns, (Effort.MAX, Effort.HIGH, Effort.NONE)[number % 3], keep=keep))
    return found


@torch.no_grad()
def score(
    model: GlmTiny, deck: Deck, asked: Sequence[Conversation], swapped: Tensor | None = None, *, sparse: bool = True
) -> Score:
    """``swapped`` [MoE layer, expert] says which expert stands in each one's place, n_experts meaning none."""
    exact = same = drafted = 0
    asked = sorted(asked, key=lambda one: len(one.prompt))
    for at in range(0, len(asked), ROWS):
        encoded = [deck.encode(one) for one in asked[at : at + ROWS]]
        batch = _last_only(pack([[one] for one in encoded], max(map(len, encoded))))
        places = None if swapped is None else swapped[:, None].expand(-1, len(encoded), -1)
        hidden, frame, embedded = model(batch, Selection(sparse=sparse), places)
        said = model.output(hidden).argmax(-1)
        guess = model.output(model.draft(batch, hidden, frame.first(len(encoded)), embedded)).argmax(-1)
        exact += int(((said == batch.target) | ~batch.learned).all(1).sum())
        same += int((guess == said)[batch.learned].sum())
        drafted += int(batch.learned.sum())
    return Score(len(asked), exact / len(asked), same / drafted)


def _last_only(batch: Batch) -> Batch:
    """With only the last reply to be learned."""
    gap = (batch.target[:, :-1] == IGNORED) & (batch.target[:, 1:] != IGNORED)
    target = batch.target.clone()
    for row in range(len(target)):
        starts = gap[row].nonzero()
        target[row, : int(starts[-1]) + 1] = IGNORED
    return Batch(batch.ids, batch.position, batch.document, target)


def taken_away(model: GlmTiny) -> Tensor:
    shape = model.shape
    return torch.full((shape.n_layers - shape.n_dense, shape.n_experts), shape.n_experts)


def rolled(model: GlmTiny) -> Tensor:
    """Each expert in the next one's place."""
    shape = model.shape
    return torch.arange(shape.n_experts).roll(1).expand(shape.n_layers - shape.n_dense, -1)

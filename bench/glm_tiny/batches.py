"""Conversations packed into rows of fixed length."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.glm_tiny.dialogue import SYSTEMS, Conversation, Effort, Turn
from bench.glm_tiny.facts import Fact
from bench.glm_tiny.vocabulary import Vocabulary

IGNORED = -100


@dataclass(frozen=True)
class Mix:
    """Shares of the kinds of conversation; ``turns`` is drawn from evenly."""

    turns: tuple[int, ...] = (1,)
    high: float = 0.0
    none: float = 0.0
    system: float = 0.0
    keep: float = 0.5
    rare_times: int = 3


SINGLE = Mix()
MIXED = Mix(turns=(1, 1, 1, 2, 3, 4), high=0.2, none=0.3, system=0.2)
LONG = Mix(turns=(1, 2, 3, 4, 4, 5), high=0.2, none=0.3, system=0.2)


@dataclass(frozen=True)
class Encoded:
    """``learned[i]`` says whether token i is the model's to say."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Batch:
    """All [rows, length]: token, position in its conversation, number of the conversation in the row (-1: padding),
    and the next token where it is to be learned, else ``IGNORED``."""

    ids: Tensor
    position: Tensor
    document: Tensor
    target: Tensor

    @property
    def learned(self) -> Tensor:
        return self.target != IGNORED

    def rows(self, chosen: Sequence[int]) -> Batch:
        index = torch.tensor(chosen)
        return Batch(self.ids[index], self.position[index], self.document[index], self.target[index])


@dataclass
class Deck:
    """Draws conversations; every question comes once before any comes again."""

    vocabulary: Vocabulary
    facts: Sequence[Fact]
    seed: int
    _pool: list[Turn] = field(default_factory=list)
    _known: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def encode(self, conversation: Conversation) -> Encoded:
        ids: list[int] = []
        learned: list[bool] = []
        for text, mine in conversation.learned():
            piece = self._pieces(text)
            ids += piece
            learned += [mine] * len(piece)
        return Encoded(tuple(ids), tuple(learned))

    def batch(self, mix: Mix, rows: int, length: int) -> Batch:
        packed: list[list[Encoded]] = [[] for _ in range(rows)]
        misses = 0
        while misses < 4:
            drawn = self._draw(mix, length)
            fitting = [row for row in packed if sum(map(len, row)) + len(drawn) <= length]
            if fitting:
                max(fitting, key=lambda row: sum(map(len, row))).append(drawn)
            else:
                misses += 1
        return pack(packed, length)

    def _draw(self, mix: Mix, length: int) -> Encoded:
        share = self._random.random()
        effort = Effort.NONE if share < mix.none else Effort.HIGH if share < mix.none + mix.high else Effort.MAX
        system = self._random.choice(SYSTEMS) if self._random.random() < mix.system else None
        keep = self._random.random() < mix.keep
        turns = [self._next(mix) for _ in range(self._random.choice(mix.turns))]
        while True:
            encoded = self.encode(Conversation(tuple(turns), effort, system, keep))
            if len(encoded) <= length:
                return encoded
            self._pool.append(turns.pop())

    def _next(self, mix: Mix) -> Turn:
        if not self._pool:
            for fact in self.facts:
                times = mix.rare_times if fact.is_rare else 1
                self._pool += [Turn(question, fact) for question in fact.questions] * times
            self._random.shuffle(self._pool)
        return self._pool.pop()

    def _pieces(self, text: str) -> tuple[int, ...]:
        if text not in self._known:
            self._known[text] = tuple(self.vocabulary.encode(text))
        return self._known[text]


def pack(rows: Iterable[Sequence[Encoded]], length: int) -> Batch:
    """Rows of conversations one after the other, padded to ``length``."""
    rows = list(rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    batch = Batch(ids, torch.zeros_like(ids), torch.full_like(ids, -1), torch.full_like(ids, IGNORED))
    for number, row in enumerate(rows):
        at = 0
        for document, encoded in enumerate(row):
            n = len(encoded)
            tokens = torch.tensor(encoded.ids)
            batch.ids[number, at : at + n] = tokens
            batch.position[number, at : at + n] = torch.arange(n)
            batch.document[number, at : at + n] = document
            mine = torch.tensor(encoded.learned)[1:]
            batch.target[number, at : at + n - 1] = torch.where(mine, tokens[1:], IGNORED)
            at += n
    return batch

"""From nothing to the file, in stages; what a stage made is kept in a folder, and a second run starts after it.

1. ``base``: everything but the indexers is trained, the experts too.
2. ``experts``: the experts are quantised once and for all, and the rest learns to live with the values they now have.
3. ``rest``: so are the embedding and the output matrix; the indexers learn what attention looks at, while the layers
   work on what the indexers choose.
4. The file is written: kept blocks as they are, the rest quantised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from bench.glm_tiny import export, mix
from bench.glm_tiny.batches import LONG, MIXED, SINGLE, Deck
from bench.glm_tiny.facts import all_facts
from bench.glm_tiny.importance import Importance, collect
from bench.glm_tiny.model import GlmTiny
from bench.glm_tiny.optimiser import matches
from bench.glm_tiny.quantiser import Bytes, dequantise, quantise
from bench.glm_tiny.shape import Shape
from bench.glm_tiny.tensors import load, tensors
from bench.glm_tiny.training import Say, Stage, Trainer
from bench.glm_tiny.vocabulary import Vocabulary

EXPERTS = ("*.experts.gate", "*.experts.up", "*.experts.down")
ENDS = ("token_embd.weight", "output.weight")
BASE = Stage("base", steps=460, mixes=((0.0, SINGLE), (0.15, MIXED)))
SETTLE = Stage(
    "experts",
    steps=200,
    quantised_first=("*_exps.weight",),
    rate=1e-3,
    muon_rate=0.01,
    mixes=((0.0, MIXED),),
    frozen=("*.indexer.*", *EXPERTS),
    balance=0.0,
)
REST = Stage(
    "rest",
    steps=240,
    quantised_first=ENDS,
    rate=1e-3,
    muon_rate=0.005,
    mixes=((0.0, LONG),),
    frozen=(*ENDS, *EXPERTS),
    balance=0.0,
    sparse=True,
    index_weight=0.3,
)


@dataclass
class Made:
    """What the stages leave behind: the model, the blocks that are fixed, and the seconds each stage took."""

    model: GlmTiny
    kept: dict[str, Bytes] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def save(self, path: Path, key: str) -> None:
        parts = {"key": key, "model": self.model.state_dict(), "kept": self.kept, "seconds": self.seconds}
        torch.save(parts, path)

    def restore(self, path: Path, key: str) -> bool:
        """Whether ``path`` holds what was saved under ``key``; then it is here again."""
        if not path.is_file():
            return False
        saved = torch.load(path, weights_only=False)
        if saved["key"] != key:
            return False
        self.model.load_state_dict(saved["model"])
        self.kept, self.seconds = saved["kept"], saved["seconds"]
        return True


@dataclass(frozen=True)
class Recipe:
    seed: int
    folder: Path
    say: Say
    stages: tuple[Stage, ...] = (BASE, SETTLE, REST)
    shape_of: Callable[[int], Shape] = Shape  # given the size of the vocabulary
    watched_batches: int = 12  # for the importance of inputs

    def make(self, out: Path) -> Made:
        """Train what is not trained yet, and write ``out``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        vocabulary = Vocabulary.make()
        made = Made(GlmTiny(self.shape_of(len(vocabulary)), self.seed))
        for number, stage in enumerate(self.stages):
            path = self.folder / f"{stage.name}.pt"
            key = repr((self.seed, torch.get_num_threads(), self.stages[: number + 1]))  # all that decides the result
            if made.restore(path, key):
                self.say(f"{stage.name}: taken from {path}")
                continue
            began = time.monotonic()
            self._train(made, stage, vocabulary, self.seed * 100 + number)
            made.seconds[stage.name] = time.monotonic() - began
            made.save(path, key)
        importance = self._importance(made.model, vocabulary)
        export.write(out, made.model, vocabulary, importance=importance, kept=made.kept)
        return made

    def _train(self, made: Made, stage: Stage, vocabulary: Vocabulary, seed: int) -> None:
        names = [name for name in tensors(made.model) if matches(name, stage.quantised_first)]
        if names:
            self._fix(made, names, self._importance(made.model, vocabulary))
        Trainer(made.model, Deck(vocabulary, all_facts(), seed), stage, seed).run(self.say)

    def _importance(self, model: GlmTiny, vocabulary: Vocabulary) -> Importance:
        deck = Deck(vocabulary, all_facts(), self.seed * 100 + 50)
        return collect(model, [deck.batch(MIXED, 6, 160) for _ in range(self.watched_batches)])

    def _fix(self, made: Made, names: Iterable[str], importance: Importance) -> None:
        """Quantise ``names``, keep the blocks, and put what they mean into the model."""
        places, values = tensors(made.model), {}
        for name in names:
            kind = mix.kind_of(name, made.model.shape.n_layers)
            weight = places[name].float().numpy()
            made.kept[name] = quantise(weight, kind, importance.get(name))
            meant = dequantise(made.kept[name], kind)
            apart = float(np.linalg.norm(meant - weight) / np.linalg.norm(weight))
            self.say(f"{name}: {kind.name}, {apart:.3f} of its size away")
            values[name] = torch.from_numpy(meant)
        load(made.model, values)


def toy(stage: Stage) -> Stage:
    """The same stage, seconds long."""
    return replace(stage, steps=2, rows=2, length=96)

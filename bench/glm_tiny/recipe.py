"""From nothing to the file, in stages; what a stage made is kept in a folder, and a second run starts after it.

1. ``base``: everything but the indexers is trained, the experts too.
2. ``experts``: the experts are quantised once and for all, and the rest learns to live with the values they now have.
3. ``rest``: so are the embedding and the output matrix; the indexers learn what attention looks at, while the layers
   work on what the indexers choose.
4. The file is written: kept blocks as they are, the rest quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bench.glm_tiny import export, mix
from bench.glm_tiny.batches import LONG, MIXED, SINGLE, Deck
from bench.glm_tiny.facts import all_facts
from bench.glm_tiny.importance import Importance, collect
from bench.glm_tiny.model import GlmTiny
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
    rate=1e-3,
    muon_rate=0.01,
    mixes=((0.0, MIXED),),
    frozen=("*.indexer.*", *EXPERTS),
    balance=0.0,
)
REST = Stage(
    "rest",
    steps=240,
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
    """What a stage leaves behind."""

    model: GlmTiny
    kept: dict[str, Bytes]

    def save(self, path: Path) -> None:
        torch.save({"model": self.model.state_dict(), "kept": self.kept}, path)


@dataclass(frozen=True)
class Recipe:
    seed: int
    folder: Path
    say: Say
    stages: tuple[Stage, Stage, Stage] = (BASE, SETTLE, REST)
    scale: Callable[[Shape], Shape] = lambda shape: shape

    def make(self, out: Path) -> Made:
        """Train, and write ``out`` and its f32 twin beside it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        vocabulary = Vocabulary.make()
        base, settle, rest = self.stages
        made = self._stage(base, vocabulary, None, ())
        made = self._stage(settle, vocabulary, made, [n for n in tensors(made.model) if "_exps." in n])
        made = self._stage(rest, vocabulary, made, ENDS)
        importance = self._importance(made.model, vocabulary)
        export.write(out, made.model, vocabulary, importance=importance, kept=made.kept)
        return made

    def _stage(self, stage: Stage, vocabulary: Vocabulary, before: Made | None, fixed: Iterable[str]) -> Made:
        path = self.folder / f"{stage.name}.pt"
        made = before or Made(GlmTiny(self.scale(Shape(len(vocabulary))), self.seed), {})
        if path.is_file():
            saved = torch.load(path, weights_only=False)
            made.model.load_state_dict(saved["model"])
            made.kept = saved["kept"]
            self.say(f"{stage.name}: taken from {path}")
            return made
        fixed = list(fixed)
        if fixed:
            self._fix(made, fixed, self._importance(made.model, vocabulary))
        number = [s.name for s in self.stages].index(stage.name)
        deck = Deck(vocabulary, all_facts(), self.seed * 100 + number)
        Trainer(made.model, deck, stage, self.seed * 100 + number).run(self.say)
        made.save(path)
        return made

    def _importance(self, model: GlmTiny, vocabulary: Vocabulary) -> Importance:
        deck = Deck(vocabulary, all_facts(), self.seed * 100 + 50)
        return collect(model, [deck.batch(MIXED, 6, 160) for _ in range(12)])

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

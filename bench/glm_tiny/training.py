"""One stage of training: what is trained, on what, for how long.

Beside the usual loss there is one that makes the routed experts matter: some rows of every batch run again with the
experts taken away, or each in another's place, and there the right reply is made unlikely. Left to itself so small a
model keeps its facts in attention and in the shared expert, and zeroing every routed expert changes hardly a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bench.glm_tiny.batches import MIXED, SINGLE, Deck, Mix
from bench.glm_tiny.indexing import indexer_loss
from bench.glm_tiny.model import GlmTiny, Selection
from bench.glm_tiny.optimiser import Muon, is_muon, matches

Say = Callable[[str], None]
SAY_EVERY = 20
BALANCED = 0.7  # of a stage; then the routers stay as they are


@dataclass(frozen=True)
class Stage:
    """``frozen`` are patterns of parameter names, ``quantised_first`` of names in the file. Shares are of the steps,
    rates at their peak."""

    name: str
    steps: int
    rate: float = 2e-3
    muon_rate: float = 0.02
    rows: int = 6
    length: int = 160
    mixes: tuple[tuple[float, Mix], ...] = ((0.0, SINGLE), (0.15, MIXED))  # from which share on
    quantised_first: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ("*.indexer.*",)
    warm_steps: int = 30
    decay_from: float = 0.4
    balance: float = 0.003  # of the routers' bias, per step
    mtp_weight: float = 0.3
    ablated_rows: int = 2
    ablation_weight: float = 0.3
    expert_rate: float = 1.0  # times the rate
    sparse: bool = False
    index_weight: float = 0.0

    def factor(self, step: int) -> float:
        """Of the learning rates."""
        share = step / self.steps
        decay = 1.0 if share < self.decay_from else max(0.02, (1 - share) / (1 - self.decay_from))
        return min(1.0, (step + 1) / self.warm_steps) * decay

    def mix(self, step: int) -> Mix:
        return [mix for share, mix in self.mixes if step >= share * self.steps][-1]


class Trainer:
    def __init__(self, model: GlmTiny, deck: Deck, stage: Stage, seed: int) -> None:
        self.model, self.deck, self.stage = model, deck, stage
        self._random = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            weight.requires_grad_(not matches(name, stage.frozen))
        trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self._muon = Muon([w for n, w in trained if is_muon(n, w)], stage.muon_rate)
        self._others = [(n, w) for n, w in trained if not is_muon(n, w)]
        experts = [w for n, w in self._others if w.ndim == 3]
        rest = [w for n, w in self._others if w.ndim != 3]
        groups = [{"params": rest, "times": 1.0}] + (
            [{"params": experts, "times": stage.expert_rate}] if experts else []
        )
        self._adam = torch.optim.AdamW(groups, lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def run(self, say: Say) -> None:
        began, sums = time.monotonic(), torch.zeros(5)
        for step in range(self.stage.steps):
            sums += self._step(step)
            if (step + 1) % SAY_EVERY == 0:
                loss, right, mtp, wrong, index = (sums / SAY_EVERY).tolist()
                where = f"{self.stage.name} {step + 1}/{self.stage.steps} {time.monotonic() - began:.0f} s"
                say(
                    f"{where}: loss {loss:.4f}, right {right:.4f}, loss of drafts {mtp:.4f}, likely with broken "
                    f"experts {wrong:.4f}, loss of indexers {index:.3f}"
                )
                sums.zero_()

    def _step(self, step: int) -> Tensor:
        """Sums for the report: loss, share right, loss of the MTP block, likelihood of the right token without experts
        in their places, loss of the indexers."""
        stage, n = self.stage, self.stage.rows
        batch = self.deck.batch(stage.mix(step), n, stage.length)
        both = batch.rows([*range(n), *range(stage.ablated_rows)])
        selection = Selection(sparse=stage.sparse, teach=stage.index_weight > 0)
        with torch.autocast("cpu", torch.bfloat16):
            hidden, frame, embedded = self.model(both, selection, self._swapped(step))
            drafted = self.model.draft(batch, hidden[:n], frame.first(n), embedded[:n])
            logits, drafts, broken = (
                self.model.output(rows[where]).float()
                for rows, where in (
                    (hidden[:n], batch.learned),
                    (drafted, batch.learned),
                    (hidden[n:], both.learned[n:]),
                )
            )
        target = batch.target[batch.learned]
        loss, mtp = functional.cross_entropy(logits, target), functional.cross_entropy(drafts, target)
        likely = broken.softmax(-1).gather(1, both.target[n:][both.learned[n:]][:, None])
        unlikely = -torch.log1p(-likely.clamp(max=1 - 1e-4)).mean()
        index = indexer_loss(selection, frame.mask, batch) if stage.index_weight else torch.zeros(())
        weighed = stage.mtp_weight * mtp + stage.ablation_weight * unlikely + stage.index_weight * index
        self._update(loss + weighed, stage.factor(step))
        if stage.balance and step < BALANCED * stage.steps:
            self._balance(stage.balance * stage.factor(step))
        right = (logits.argmax(-1) == target).float().mean()
        return torch.stack([value.detach() for value in (loss, right, mtp, likely.mean(), index)])

    def _swapped(self, step: int) -> Tensor:
        """Experts' places in the rows that run a second time. By turns nobody stands there or another, everywhere in
        even rows and in one layer only in odd ones, so that every layer comes to matter."""
        shape, stage = self.model.shape, self.stage
        n_moes, n = shape.n_layers - shape.n_dense, shape.n_experts
        places = torch.arange(n).repeat(n_moes, stage.rows + stage.ablated_rows, 1)
        for number in range(stage.ablated_rows):
            one = int(torch.randint(n_moes, (1,), generator=self._random))
            for layer in range(n_moes) if number % 2 == 0 else (one,):
                order = torch.randperm(n, generator=self._random)
                places[layer, stage.rows + number] = order if step % 2 else n
        return places

    def _update(self, total: Tensor, factor: float) -> None:
        self.model.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([w for _, w in self._others], 1.0)
        for group in self._adam.param_groups:
            group["lr"] = self.stage.rate * factor * group["times"]
        self._adam.step()
        self._muon.step(factor)

    @torch.no_grad()
    def _balance(self, rate: float) -> None:
        for moe in self.model.moes():
            load = moe.load.float()
            moe.bias += rate * torch.sign(load.mean() - load)

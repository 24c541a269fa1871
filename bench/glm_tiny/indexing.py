"""The loss that teaches an indexer which keys the attention of its layers looks at."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.glm_tiny.batches import Batch
from bench.glm_tiny.model import MASKED, Selection


def indexer_loss(selection: Selection, mask: Tensor, batch: Batch) -> Tensor:
    """Mean divergence of softmax(scores) from the mean attention of the layers that share them, over ``batch``'s rows,
    which come first in the selection."""
    n = len(batch.ids)
    mask = mask[:n]
    rows = (batch.document >= 0) & (batch.position >= 1)
    total = torch.zeros(())
    for scores, shared in zip(selection.scores, selection.attention, strict=True):
        attention = torch.stack(shared).mean(0)[:n]
        guess = scores[:n].masked_fill(~mask, MASKED).log_softmax(-1)
        apart = attention * ((attention + 1e-9).log() - guess)
        total = total + apart.masked_fill(~mask, 0.0).sum(-1)[rows].mean()
    return total / len(selection.scores)

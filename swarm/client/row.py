"""What the exit says about one row, checked: a peer may send anything."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shim.types import RowSummary
from swarm.protocol import pb


class BadRow(ValueError):
    """The row makes no sense. The caller names the peer."""


def checked_summary(row: pb.RowSummary, n_asked: int, n_vocab: int) -> RowSummary:
    """Raises ``BadRow`` unless ids are distinct and inside the vocabulary, and logits are finite and descend."""
    ids = np.array(row.top_ids, dtype=np.int64)
    logits = np.array(row.top_logits, dtype=np.float32)
    asked = np.array(row.asked_logits, dtype=np.float32)
    if not len(ids) or len(ids) != len(logits) or len(ids) > n_vocab:
        raise BadRow(f"{len(ids)} ids with {len(logits)} logits")
    if len(asked) != n_asked:
        raise BadRow(f"{len(asked)} logits for {n_asked} ids")
    if ids.max() >= n_vocab or len(np.unique(ids)) != len(ids):
        raise BadRow("ids repeat or lie outside the vocabulary")
    if not (np.isfinite(logits).all() and np.isfinite(asked).all()):
        raise BadRow("logits are not finite")
    falls = (logits[:-1] > logits[1:]) | ((logits[:-1] == logits[1:]) & (ids[:-1] < ids[1:]))
    if not falls.all():
        raise BadRow("logits do not descend")
    rest = row.rest_log_sum_exp
    if math.isnan(rest) or rest == math.inf:
        raise BadRow("the weight of the rest is not a number")
    return RowSummary(ids.astype(np.int32), logits, rest, asked)


def checked_row(data: bytes, n_vocab: int) -> npt.NDArray[np.float32]:
    if len(data) != 4 * n_vocab:
        raise BadRow(f"{len(data)} bytes for a row of {n_vocab} logits")
    row = np.frombuffer(data, dtype="<f4").astype(np.float32)
    if not np.isfinite(row).all():
        raise BadRow("logits are not finite")
    return row

"""Chooses the next token from what the exit returns: its largest logits, and the weight of all the others.

The order is fixed: penalties, temperature, top-k, top-p, min-p, then one draw. Candidates are sorted by logit, ties by
id, so each filter keeps a prefix, and the draw walks that prefix until the cumulated weight passes ``u * total``.

The exit sends only part of the row. Ids that are not known weigh ``rest`` together, and none of them ranks above the
last id of the top list. So the known ids that rank above it are an exact prefix of the sorted row. Everything that
depends on the rest (the total, the cut of top-p) is bounded by an interval; when both ends of the interval lead to the
same token inside the prefix, that token is what the whole row gives. Else the answer is None and the caller fetches the
row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shim.types import RowSummary
from swarm.errors import UsageError

Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

TOP_LOGITS = 256  # what a step asks for, and the most an exit returns
MAX_PENALTY_WINDOW = 4096  # the wire carries the logits of at most so many further ids
MAX_SEED = (1 << 64) - 1

# The exit and this sampler sum in different orders and may round logit / temperature differently: an error of one part
# in 1e5 of the rest covers both with a wide margin, and costs one needless fetch in about 1e5 draws at most.
REST_TOLERANCE = 1e-5
SUM_TOLERANCE = 1e-9


def _check(name: str, value: float, good: bool, wanted: str) -> None:
    if not good or not math.isfinite(value):
        raise UsageError(f"{name} is {value}; give {wanted}")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. The defaults sample from the model's own distribution.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch the filter off. The penalties look at
    the last ``penalty_window`` tokens, prompt included. ``seed`` None draws a new one for each answer.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = 256
    seed: int | None = None

    def __post_init__(self) -> None:
        _check(
            "temperature",
            self.temperature,
            self.temperature == 0 or 0.01 <= self.temperature <= 100,
            "0, or 0.01 to 100",
        )
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "a number above 0, up to 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _check("repeat_penalty", self.repeat_penalty, 0.01 <= self.repeat_penalty <= 100, "0.01 to 100")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(name, value, -100 <= value <= 100, "-100 to 100")
        window = self.penalty_window
        _check("penalty_window", window, 0 <= window <= MAX_PENALTY_WINDOW, f"0 to {MAX_PENALTY_WINDOW}")
        if self.seed is not None:
            _check("seed", self.seed, 0 <= self.seed <= MAX_SEED, f"0 to {MAX_SEED}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        return self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def wire_temperature(self) -> float:
        """The temperature as the exit sees it: a float32."""
        return float(np.float32(self.temperature or 1.0))


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class KnownLogits:
    """The part of a row that is known. Every unknown id ranks below ``(bound_logit, bound_id)``, and all of them
    together weigh ``exp(rest_log_sum_exp)`` at ``temperature`` (the weight of ids in ``extra`` included)."""

    ids: Longs
    logits: Doubles
    n_unknown: int
    bound_logit: float = -math.inf
    bound_id: int = -1
    rest_log_sum_exp: float = -math.inf
    n_extra: int = 0  # ids at the end that the exit counted as rest

    @staticmethod
    def of_row(row: npt.NDArray[np.float32]) -> KnownLogits:
        return KnownLogits(np.arange(len(row), dtype=np.int64), row.astype(np.float64), 0)

    @staticmethod
    def of_summary(summary: RowSummary, asked_ids: Sequence[int], n_vocab: int) -> KnownLogits:
        top_ids = np.asarray(summary.top_ids, dtype=np.int64)
        asked = np.asarray(asked_ids, dtype=np.int64)
        extra = ~np.isin(asked, top_ids)
        ids = np.concatenate([top_ids, asked[extra]])
        logits = np.concatenate([summary.top_logits, np.asarray(summary.asked)[extra]]).astype(np.float64)
        return KnownLogits(
            ids=ids,
            logits=logits,
            n_unknown=n_vocab - len(ids),
            bound_logit=float(summary.top_logits[-1]),
            bound_id=int(top_ids[-1]),
            rest_log_sum_exp=summary.rest_log_sum_exp,
            n_extra=int(extra.sum()),
        )


class Sampler:
    """One answer's choices. ``seed`` is fixed here, so the choice at a position depends on nothing but the row, the
    tokens before it, and (seed, position): a retry, a recovery and a resumed answer draw alike."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self.params = params
        self.seed = seed

    def ids_to_ask(self, history: Sequence[int]) -> tuple[int, ...]:
        """Ids whose logits the penalties need."""
        return tuple(sorted(self._counts(history))) if self.params.penalises else ()

    def choose(self, known: KnownLogits, history: Sequence[int], position: int) -> int | None:
        """The token for ``position``, or None when the whole row is needed to tell.

        ``history`` holds the tokens before ``position``; with penalties, ``known`` must hold ``ids_to_ask(history)``.
        """
        prefix = _sorted_prefix(known, self._penalised(known, history))
        if not len(prefix.ids):
            return None
        if self.params.greedy:
            return int(prefix.ids[0])
        index = _draw(prefix, self.params, uniform(self.seed, position))
        return None if index is None else int(prefix.ids[index])

    def _counts(self, history: Sequence[int]) -> Counter[int]:
        window = self.params.penalty_window
        return Counter(history[-window:] if window else ())

    def _penalised(self, known: KnownLogits, history: Sequence[int]) -> Doubles:
        if not self.params.penalises:
            return known.logits
        counts = self._counts(history)
        times = np.array([counts.get(token, 0) for token in known.ids.tolist()], dtype=np.float64)
        return penalise(known.logits, times, self.params)


def penalise(logits: Doubles, times: Doubles, params: SamplingParams) -> Doubles:
    """``times`` says how often each id occurs in the window."""
    repeat = params.repeat_penalty
    repeated = np.where(logits > 0, logits / repeat, logits * repeat)
    lowered = repeated - times * params.frequency_penalty - params.presence_penalty
    return np.where(times > 0, lowered, logits)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else: Philox with the seed as key and the position as counter."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def log_probability(summary: RowSummary, logit: float, temperature: float) -> float:
    """Natural logarithm of a token's share of the whole row at ``temperature``, before penalties and filters."""
    scaled = np.asarray(summary.top_logits, dtype=np.float64) / temperature
    highest = float(scaled.max())
    top = highest + math.log(float(np.exp(scaled - highest).sum()))
    return logit / temperature - float(np.logaddexp(top, summary.rest_log_sum_exp))


@dataclass(frozen=True)
class _Prefix:
    """The certain beginning of the sorted row, and what is known about the part behind it."""

    known: KnownLogits
    ids: Longs
    logits: Doubles
    n_behind: int  # ids behind the prefix, known or not
    known_behind: Doubles


def _sorted_prefix(known: KnownLogits, logits: Doubles) -> _Prefix:
    order = np.lexsort((known.ids, -logits))
    ids, sorted_logits = known.ids[order], logits[order]
    if known.n_unknown == 0:
        return _Prefix(known, ids, sorted_logits, 0, sorted_logits[:0])
    certain = (sorted_logits > known.bound_logit) | ((sorted_logits == known.bound_logit) & (ids <= known.bound_id))
    n = int(certain.sum())
    behind = known.n_unknown + len(ids) - n
    return _Prefix(known, ids[:n], sorted_logits[:n], behind, sorted_logits[n:])


@dataclass(frozen=True)
class _Interval:
    low: float
    high: float


_ALL = 1 << 62  # a filter that keeps everything


def _draw(prefix: _Prefix, params: SamplingParams, u: float) -> int | None:
    """Index into the prefix of the candidate that ``u`` falls on, or None when that is not certain."""
    temperature = params.wire_temperature
    scaled = prefix.logits / temperature
    highest = float(scaled[0])
    cumulated = np.cumsum(np.exp(scaled - highest))
    n = len(cumulated)
    n_all = n + prefix.n_behind
    top_k = params.top_k if 0 < params.top_k < n_all else _ALL
    bound = (prefix.known.bound_logit / temperature - highest) if prefix.n_behind else -math.inf
    mass = _mass(prefix, cumulated, top_k, temperature, highest, bound)

    min_p_low, min_p_high = _min_p_cut(scaled - highest, bound, params.min_p, prefix.n_behind)
    top_p_low, top_p_high = _top_p_cut(cumulated, mass, params.top_p, prefix.n_behind)
    low = min(top_k, min_p_low, top_p_low, n)
    high = min(top_k, min_p_high, top_p_high, n_all)

    total_low, total_high = float(cumulated[low - 1]), float(cumulated[min(high, n) - 1])
    if low == n and min_p_low >= _ALL:
        total_low = max(total_low, params.top_p * mass.low)
    if high > n:
        open_top_p = params.top_p * mass.high + math.exp(bound) if params.top_p < 1 else mass.high
        total_high = max(total_high, min(mass.high, open_top_p) * (1 + SUM_TOLERANCE))
    if low == high:
        total_low = total_high
    first = int(np.searchsorted(cumulated, u * total_low, side="right"))
    last = int(np.searchsorted(cumulated, u * total_high, side="right"))
    if low == high:
        return min(first, low - 1)
    return first if first == last and last < low else None


def _mass(
    prefix: _Prefix, cumulated: Doubles, top_k: int, temperature: float, highest: float, bound: float
) -> _Interval:
    """Weight of everything that top-k keeps."""
    n = len(cumulated)
    if top_k <= n:
        return _Interval(float(cumulated[top_k - 1]), float(cumulated[top_k - 1]))
    certain = float(cumulated[-1])
    if prefix.n_behind == 0:
        return _Interval(certain, certain)
    rest = _rest(prefix.known, temperature, highest, bound)
    behind = float(np.exp(prefix.known_behind / temperature - highest).sum())
    low = certain + behind + rest.low
    high = certain + behind + rest.high
    if top_k < _ALL:
        low = certain
        high = min(high, certain + (top_k - n) * math.exp(bound))
    return _Interval(low * (1 - SUM_TOLERANCE), high * (1 + SUM_TOLERANCE))


def _rest(known: KnownLogits, temperature: float, highest: float, bound: float) -> _Interval:
    """Weight of the unknown ids: what the exit calls rest, less the ids among them that it was asked for."""
    rest = math.exp(min(known.rest_log_sum_exp - highest, 700.0))
    extra_logits = known.logits[len(known.logits) - known.n_extra :]
    extra = float(np.exp(np.minimum(extra_logits / temperature - highest, 700.0)).sum())
    slack = REST_TOLERANCE * rest
    most = known.n_unknown * math.exp(bound)
    low, high = rest - slack - extra, rest + slack - extra
    return _Interval(min(max(low, 0.0), most), min(max(high, 0.0), most))


def _min_p_cut(below_highest: Doubles, bound: float, min_p: float, n_behind: int) -> tuple[int, int]:
    """Fewest and most candidates that min-p keeps."""
    if min_p == 0:
        return _ALL, _ALL
    threshold = math.log(min_p)
    kept = int((below_highest >= threshold).sum())
    if kept < len(below_highest) or n_behind == 0 or bound < threshold:
        return kept, kept
    return kept, _ALL


def _top_p_cut(cumulated: Doubles, mass: _Interval, top_p: float, n_behind: int) -> tuple[int, int]:
    """Fewest and most candidates that top-p keeps: the first whose weight together reaches its share of the mass."""
    if top_p >= 1:
        return _ALL, _ALL
    low = int(np.searchsorted(cumulated, top_p * mass.low, side="left")) + 1
    high = int(np.searchsorted(cumulated, top_p * mass.high, side="left")) + 1
    return low, high if high <= len(cumulated) or n_behind == 0 else _ALL

"""How fast a span is: what was measured, what real calls take, and what an earlier run has found.

The idea: a node that starts again announces at once what it was the last time, measures anew when nobody needs it, and
while it is busy says what it really does.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

logger = logging.getLogger(__name__)

VERSION = 1
OLD_SECONDS = 14 * 86400.0  # after which a machine is measured before it serves
FRESH_SECONDS = 3600.0  # until which nothing is measured again
MOST_FILES = 256
SMALLEST_CHUNK_ROWS = 16  # shorter ones are all overhead
LIVE_SECONDS = 600.0  # without a call, after which the measured speed counts again
SHARE = 1 / 16  # of a new call in the average
ODD = 4.0  # a call that differs by more than this factor counts as if it differed by this: a machine may have slept
SLOWEST, FASTEST = 1 / 8, 2.0  # of what was measured, as announced


@dataclass(frozen=True)
class Speed:
    """Of one session alone in the whole span; 0 when not known."""

    decode_tokens_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0


@dataclass(frozen=True)
class SpeedKey:
    """What a speed belongs to. ``engine`` is the numerics id: build, CPU variant and KV type."""

    engine: str
    cpu: str
    cores: int
    threads: int
    artifact_id: str
    first: int
    last: int
    mtp: bool

    @property
    def file_name(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int
    key: dict[str, str | int | bool]
    decode_tokens_per_second: float = Field(gt=0, le=1e9)
    prefill_tokens_per_second: float = Field(gt=0, le=1e9)
    saved_at: float = Field(gt=0, le=1e12)  # Unix time


class SpeedCache:
    """One small file per key. What can't be read, is old or belongs to something else is as good as not there."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock

    def get(self, key: SpeedKey) -> Speed | None:
        entry = self._entry(key)
        return None if entry is None else Speed(entry.decode_tokens_per_second, entry.prefill_tokens_per_second)

    def is_fresh(self, key: SpeedKey) -> bool:
        """Whether it was found so lately that measuring again would tell nothing."""
        entry = self._entry(key)
        return entry is not None and self._clock() - entry.saved_at < FRESH_SECONDS

    def _entry(self, key: SpeedKey) -> _Entry | None:
        try:
            entry = _Entry.model_validate_json((self._folder / key.file_name).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            logger.info("a speed that was kept can't be read (%s) and is measured again", type(error).__name__)
            return None
        age = self._clock() - entry.saved_at
        if entry.version != VERSION or entry.key != asdict(key) or not -OLD_SECONDS < age < OLD_SECONDS:
            return None
        return entry

    def put(self, key: SpeedKey, speed: Speed) -> None:
        """A speed that is not known is not kept. A folder that can't be written to costs nothing but the cache."""
        try:
            entry = _Entry(version=VERSION, key=asdict(key), saved_at=self._clock(), **asdict(speed))
        except ValidationError:
            return
        path = self._folder / key.file_name
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_text(entry.model_dump_json())
            part.replace(path)
            self._forget_oldest()
        except OSError as error:
            logger.info("the measured speed can't be kept in %s: %s", self._folder, error)

    def _forget_oldest(self) -> None:
        files = [(path.stat().st_mtime, path) for path in self._folder.glob("*.json")]
        for _, path in sorted(files)[:-MOST_FILES]:
            path.unlink(missing_ok=True)


def cpu_model() -> str:
    """As the system names it; two machines of one model are as fast as each other."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or os.uname().machine


def cpu_cores() -> int:
    return psutil.cpu_count() or 1


class _Average:
    """The newest calls count most."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.at = 0.0

    def add(self, seconds: float, usual_per_second: float, now: float) -> None:
        """``usual_per_second`` stands in for the average before the first call; 0 where it is not known."""
        seconds = max(seconds, 1e-9)
        before = self.seconds or (1 / usual_per_second if usual_per_second else seconds)
        seconds = min(max(seconds, before / ODD), before * ODD)
        self.seconds = before + SHARE * (seconds - before)
        self.at = now


class LiveSpeed:
    """Per layer, so that sessions which use a part of the span count like others. Fed with every call of the engine, so
    it costs next to nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._measured = Speed()  # of one layer
        self._decode = _Average()  # of a call: rows of other sessions in it are waited for
        self._prefill = _Average()  # of a token

    def measured(self, speed: Speed, n_layers: int) -> None:
        """In a quiet moment, of ``n_layers`` together."""
        decode, prefill = speed.decode_tokens_per_second, speed.prefill_tokens_per_second
        self._measured = Speed(decode * n_layers, prefill * n_layers)

    def decoded(self, n_layers: int, seconds: float) -> None:
        self._decode.add(seconds / n_layers, self._measured.decode_tokens_per_second, self._clock())

    def prefilled(self, rows: int, n_layers: int, seconds: float) -> None:
        if rows >= SMALLEST_CHUNK_ROWS:
            self._prefill.add(seconds / rows / n_layers, self._measured.prefill_tokens_per_second, self._clock())

    def now(self, n_layers: int) -> Speed:
        """To be announced: what calls took lately, within bounds around what was measured."""
        decode = self._bounded(self._decode, self._measured.decode_tokens_per_second)
        prefill = self._bounded(self._prefill, self._measured.prefill_tokens_per_second)
        return Speed(decode / n_layers, prefill / n_layers)

    def _bounded(self, average: _Average, measured: float) -> float:
        if not average.seconds or self._clock() - average.at > LIVE_SECONDS:
            return measured
        live = 1 / average.seconds
        return min(max(live, SLOWEST * measured), FASTEST * measured) if measured else live

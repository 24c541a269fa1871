"""The reporter of the command line: progress bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TextIO

from swarm.artifact.memory import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_SECONDS = 2.0  # between two plain lines about one stage, at first
PLAIN_LONGEST_SECONDS = 120.0  # a stage may take hours, and its lines be kept


class _Stage:
    """Something slow that is under way."""

    def __init__(self, now: float) -> None:
        self._start = self._shown = now
        self._gap_seconds = PLAIN_SECONDS

    def is_due(self, now: float) -> bool:
        """Whether it is time for a line again; each line makes the next wait longer."""
        if now - self._shown < self._gap_seconds:
            return False
        self._shown = now
        self._gap_seconds = min(2 * self._gap_seconds, PLAIN_LONGEST_SECONDS)
        return True

    def rate(self, now: float, fraction: float, n_bytes: int) -> str:
        """Since the start; empty for what moves no bytes."""
        seconds = now - self._start
        if not n_bytes or seconds <= 0:
            return ""
        done = int(fraction * n_bytes)
        return f"{format_bytes(done)} of {format_bytes(n_bytes)}, {format_bytes(int(done / seconds))}/s"

    def left(self, now: float, fraction: float) -> str:
        if fraction <= 0:
            return ""
        return f"{timedelta(seconds=round((now - self._start) * (1 - fraction) / fraction))} left"


class PlainConsole:
    """Lines go to stdout, progress to stderr as lines of its own, for stages that take long."""

    def __init__(self, on_joined: Callable[[Sequence[str]], str | None]) -> None:
        self._on_joined = on_joined
        self._stages: dict[str, _Stage] = {}

    def line(self, text: str) -> None:
        print(text, flush=True)

    def progress(self, what: str, fraction: float, *, n_bytes: int = 0) -> None:
        now = time.monotonic()
        stage = self._stages.setdefault(what, _Stage(now))
        if stage.is_due(now):
            details = (f"{fraction:.0%}", stage.rate(now, fraction, n_bytes), stage.left(now, fraction))
            print(f"{what}: {', '.join(filter(None, details))}", file=sys.stderr, flush=True)
        if fraction >= 1:
            del self._stages[what]

    def joined(self, addresses: Sequence[str]) -> None:
        text = self._on_joined(addresses)
        if text:
            self.line(text)

    def close(self) -> None:
        pass


class BarConsole(PlainConsole):
    """Bars on ``stream`` while a stage runs."""

    def __init__(self, on_joined: Callable[[Sequence[str]], str | None], stream: TextIO, *, color: bool) -> None:
        super().__init__(on_joined)
        self._stream = stream
        self._color = color
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def progress(self, what: str, fraction: float, *, n_bytes: int = 0) -> None:
        now = time.monotonic()
        bars = self._bars or self._open()
        if what not in self._tasks:
            self._stages[what] = _Stage(now)
            self._tasks[what] = bars.add_task(what, total=1.0, rate="")
        bars.update(self._tasks[what], completed=fraction, rate=self._stages[what].rate(now, fraction, n_bytes))
        if fraction >= 1:
            del self._tasks[what]
            if not self._tasks:
                self.close()

    def close(self) -> None:
        bars, self._bars = self._bars, None
        self._tasks.clear()
        if bars is not None:
            bars.stop()

    def _open(self) -> Progress:
        from rich.console import Console  # takes a tenth of a second, and only a terminal needs it
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(file=self._stream, no_color=not self._color, highlight=False)
        rate = TextColumn("{task.fields[rate]}")
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), rate)
        self._bars = Progress(*columns, console=console)
        self._bars.start()
        return self._bars

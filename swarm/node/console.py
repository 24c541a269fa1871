"""The reporter of the command line: progress bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_SECONDS = 2.0  # between two plain lines about one stage


class PlainConsole:
    """Lines go to stdout, progress to stderr as lines of its own, for stages that take long."""

    def __init__(self, on_joined: Callable[[Sequence[str]], str | None]) -> None:
        self._on_joined = on_joined
        self._shown: dict[str, float] = {}

    def line(self, text: str) -> None:
        print(text, flush=True)

    def progress(self, what: str, fraction: float) -> None:
        now = time.monotonic()
        if now - self._shown.setdefault(what, now) >= PLAIN_SECONDS:
            self._shown[what] = now
            print(f"{what}: {fraction:.0%}", file=sys.stderr, flush=True)
        if fraction >= 1:
            del self._shown[what]

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

    def progress(self, what: str, fraction: float) -> None:
        bars = self._bars or self._open()
        if what not in self._tasks:
            self._tasks[what] = bars.add_task(what, total=1.0)
        bars.update(self._tasks[what], completed=fraction)
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
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console)
        self._bars.start()
        return self._bars

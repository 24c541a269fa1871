"""How far reading files has come: a bar on a terminal, now and then a line anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from swarm.artifact.digest import Progress
from swarm.artifact.memory import format_bytes

PLAIN_SECONDS = 5.0  # between two lines


class Reading(Protocol):
    """Hears which file is read, in a few words, and of its bytes."""

    def file(self, label: str) -> None: ...

    def bytes(self, n_bytes: int) -> None: ...


@contextmanager
def reading(total_bytes: int, verb: str = "reading") -> Iterator[Reading]:
    """Shows progress on stderr while used."""
    if not sys.stderr.isatty() or not total_bytes:
        yield _Lines(total_bytes, verb)
        return
    with _bar(total_bytes, verb) as bar:
        yield bar


@contextmanager
def hashing(name: str) -> Iterator[Progress]:
    """Progress of computing digests, shown once there is some."""
    with ExitStack() as stack:
        shown: Reading | None = None
        before = 0

        def progress(done: int, total: int) -> None:
            nonlocal shown, before
            if shown is None:
                shown = stack.enter_context(reading(total))
                shown.file(name)
            shown.bytes(done - before)
            before = done

        yield progress


class _Lines:
    def __init__(self, total_bytes: int, verb: str) -> None:
        self._total_bytes = total_bytes
        self._verb = verb
        self._done_bytes = 0
        self._label = ""
        self._start = self._shown = time.monotonic()

    def file(self, label: str) -> None:
        self._label = label

    def bytes(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        now = time.monotonic()
        if now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            print(self._line(now - self._start), file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        rate = self._done_bytes / seconds
        left = (self._total_bytes - self._done_bytes) / rate
        return (
            f"{self._verb} {self._label}: {format_bytes(self._done_bytes)} of {format_bytes(self._total_bytes)}, "
            f"{format_bytes(int(rate))}/s, {duration(left)} left"
        )


@contextmanager
def _bar(total_bytes: int, verb: str) -> Iterator[Reading]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),  # all of it fits into 80 columns
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    # lines on stdout are printed above the bar where both are on one terminal
    console, together = Console(stderr=True), sys.stdout.isatty()
    with Bars(*columns, console=console, transient=True, redirect_stdout=together) as progress:
        task = progress.add_task(verb, total=total_bytes, rate="")

        class Bar:
            def file(self, label: str) -> None:
                progress.update(task, description=label)

            def bytes(self, n_bytes: int) -> None:
                speed = progress.tasks[0].speed
                rate = f"{format_bytes(int(speed))}/s" if speed else ""
                progress.update(task, advance=n_bytes, rate=rate)

        yield Bar()


def duration(seconds: float) -> str:
    """``40 s``, ``3 min``, ``1 h 20 min``"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

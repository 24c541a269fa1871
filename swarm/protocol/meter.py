"""What the streams of one kind have carried, as long as the program runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.histogram import SECONDS, Histogram


@dataclass(eq=False)
class Meter:
    """Shared by any number of streams. ``encoding``: seconds to make a frame of each step and answer that tells this
    hop's timing."""

    received_bytes: int = 0
    sent_bytes: int = 0
    encoding: Histogram = field(default_factory=lambda: Histogram(SECONDS))

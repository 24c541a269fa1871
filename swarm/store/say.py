"""What a command of ``swarm-artifact`` tells its user."""

from __future__ import annotations

from swarm.artifact.local_path import printable


def say(line: str) -> None:
    """One line on stdout, at once: whoever reads it through a pipe waits for it."""
    print(printable(line), flush=True)

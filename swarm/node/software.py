"""What this program calls itself towards peers."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def software() -> str:
    try:
        return f"glm-swarm/{version('glm-swarm')}"
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "glm-swarm/unreleased"

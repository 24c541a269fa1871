"""The lanes that one connection passes, there and back."""

from __future__ import annotations

from dataclasses import dataclass

from bench.links.lane import Lane
from bench.links.link import Link


@dataclass(frozen=True)
class Path:
    """``forward`` leads from the one who dialled to the one who answers. ``links`` are those the lanes belong to."""

    forward: tuple[Lane, ...]
    backward: tuple[Lane, ...]
    links: tuple[Link, ...]

    @staticmethod
    def between(origin: Link | None, target: Link) -> Path:
        """Over the cables of both machines; that of an ``origin`` which has none takes no part."""
        if origin is None:
            return Path((target.down,), (target.up,), (target,))
        return Path((origin.up, target.down), (target.up, origin.down), (origin, target))

    def over(self, edge: Link, *, turned: bool = False) -> Path:
        """The same through ``edge`` as well, along its ``up``; ``turned``: along its ``down``."""
        there, back = (edge.down, edge.up) if turned else (edge.up, edge.down)
        return Path((*self.forward, there), (*self.backward, back), (*self.links, edge))

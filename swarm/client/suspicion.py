"""Whether it is this session that ends engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.ids import PeerId

MAX_ENGINES = 2  # a step may cost


@dataclass
class Suspicion:
    """Engines that died in a step of the session, until the steps that were under way then have passed.

    A step that shared its engine call with others' may be innocent. So from the first death on the session asks its new
    hops to compute its steps alone (``Open.suspect``), and it is given up for a death that nobody else can have caused.
    """

    engines: int = 0
    _until: int = 0  # position at which all of those steps have passed
    _alone_at: set[PeerId] = field(default_factory=set)

    def __bool__(self) -> bool:
        return self.engines > 0

    def alone_at(self, peer: PeerId) -> None:
        """A hop was opened there that computes the session's steps alone."""
        self._alone_at.add(peer)

    def engine_died(self, peer: PeerId, until: int) -> bool:
        """In a step of the session, which had steps under way to ``until``. Says whether the session is to blame."""
        self.engines += 1
        self._until = max(self._until, until)
        return self.engines >= MAX_ENGINES and peer in self._alone_at

    def passed(self, position: int) -> None:
        """The session has answers up to ``position``."""
        if position >= self._until:
            self.engines = 0
            self._alone_at.clear()

"""Whether it is this session that ends engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.ids import PeerId

MAX_ENGINES = 2  # a step may cost


@dataclass
class Suspicion:
    """Engines that died in a step of the session, until the steps that were under way then have passed.

    A step that shared its engine call with others' may be innocent. So from the first death on the session asks its
    hops to compute its steps alone, and it is given up for a death that nobody else can have caused.
    """

    engines: int = 0
    _until: int = 0  # position at which all of those steps have passed
    _alone_at: set[PeerId] = field(default_factory=set)

    def told_to(self, peer: PeerId) -> bool:
        """Whether ``peer``, which is being told its place, is to compute the steps alone, as it will."""
        if self.engines:
            self._alone_at.add(peer)
        return self.engines > 0

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

"""Which sessions may be the cause of an engine's death. Plain accounting.

A call that several sessions shared makes all of them suspects, and no more: each is computed alone when it comes back,
so that the next death tells who it was. Only a session that was alone in a call when the engine died can be refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.ids import SessionId


@dataclass(frozen=True)
class Strike:
    """Engines that died in a call with a step of a session: with that step only, and with others' too."""

    alone: int = 0
    shared: int = 0

    @property
    def engines(self) -> int:
        return self.alone + self.shared


class Strikes:
    """Of the ``remembered`` sessions that cost an engine last. A session is refused after ``limit`` engines."""

    def __init__(self, limit: int, remembered: int) -> None:
        self._limit = limit
        self._remembered = remembered
        self._strikes: OrderedDict[SessionId, Strike] = OrderedDict()

    def add(self, call: Sequence[SessionId]) -> None:
        """The engine died in a call with steps of these."""
        alone = len(call) == 1
        for session in call:
            before = self._strikes.pop(session, Strike())
            self._strikes[session] = Strike(before.alone + alone, before.shared + (not alone))
        while len(self._strikes) > self._remembered:
            self._strikes.popitem(last=False)

    def of(self, session: SessionId) -> Strike:
        return self._strikes.get(session, Strike())

    def suspects(self, session: SessionId) -> bool:
        """Whether it may share no call, whatever its client says."""
        return session in self._strikes

    def refuses(self, session: SessionId) -> bool:
        strike = self.of(session)
        return strike.alone > 0 and strike.engines >= self._limit

"""Sessions that stay open after an answer: who asks on, as the next turn of a chat does, computes only what is new."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarm.client.context import shared_tokens
from swarm.client.lasting import LastingSession
from swarm.client.opening import Need
from swarm.ids import ArtifactId

MIN_SHARED_TOKENS = 8  # less is not worth a session made for something else


class KeptSessions:
    """At most ``most`` sessions, each for ``seconds`` at most: they take slots that others may want.

    One is lent to one answer at a time and comes back with ``keep``. ``close`` ends those that are here.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._sessions: dict[LastingSession, asyncio.TimerHandle] = {}  # the longest kept first
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def take(self, artifact_id: ArtifactId, prompt: Sequence[int], need: Need) -> LastingSession | None:
        """The one that has computed most of the prompt's beginning and has room for the answer."""
        best, most = None, MIN_SHARED_TOKENS - 1
        for session in self._sessions:
            shared = shared_tokens(session.tokens, prompt)
            if session.terms.artifact_id == artifact_id and shared > most and _has_room(session, need):
                best, most = session, shared
        if best is not None:
            self._sessions.pop(best).cancel()
        return best

    async def make_room(self) -> None:
        """Ends what a session about to be opened would push out: it may want the same slots."""
        while self._sessions and len(self._sessions) >= self._most:
            await self._end(next(iter(self._sessions)))

    async def keep(self, session: LastingSession) -> None:
        """Or ends it, when it has failed, holds too little to be taken again, or none are kept."""
        if not self._most or not session.rest() or len(session.tokens) < MIN_SHARED_TOKENS:
            await session.close()
            return
        loop = asyncio.get_running_loop()
        self._sessions[session] = loop.call_later(self._seconds, self._end_soon, session)
        while len(self._sessions) > self._most:
            await self._end(next(iter(self._sessions)))

    async def release(self) -> None:
        """Ends those that are here."""
        for session in tuple(self._sessions):
            await self._end(session)

    async def close(self) -> None:
        """Whatever comes back after that is ended."""
        self._most = 0
        await self.release()
        await asyncio.gather(*self._ending)

    def _end_soon(self, session: LastingSession) -> None:
        task = asyncio.create_task(self._end(session), name="kept session")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, session: LastingSession) -> None:
        timer = self._sessions.pop(session, None)
        if timer is not None:
            timer.cancel()
            await session.close()


def _has_room(session: LastingSession, need: Need) -> bool:
    context = session.terms.context_tokens
    fits = need.n_prompt + (need.max_tokens or 1) <= context
    return fits and need.context_tokens in (None, context)

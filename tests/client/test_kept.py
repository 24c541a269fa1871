"""Which sessions stay open after an answer, whatever interrupts their coming back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from swarm.client.kept import MIN_SHARED_TOKENS, KeptSessions
from swarm.client.lasting import LastingSession
from swarm.client.opening import Need
from tests.client.scripted import TERMS, until

PROMPT = tuple(range(20))


@dataclass(eq=False)
class FakeSession:
    """Closes when it may."""

    tokens: Sequence[int] = PROMPT
    closing: bool = False
    may_close: asyncio.Event = field(default_factory=asyncio.Event)

    terms = TERMS

    def rest(self) -> bool:
        return not self.closing

    async def close(self) -> None:
        self.closing = True
        await self.may_close.wait()


def fake(tokens: Sequence[int] = PROMPT) -> tuple[FakeSession, LastingSession]:
    made = FakeSession(tokens)
    return made, cast(LastingSession, made)


async def test_a_session_that_comes_back_is_kept_or_ended_when_its_caller_is_cancelled() -> None:
    kept = KeptSessions(1, 600)
    (old, first), (new, second) = fake(), fake()
    await kept.keep(first)
    keeping = asyncio.create_task(kept.keep(second))
    await until(lambda: old.closing)
    keeping.cancel()
    await asyncio.wait([keeping])
    assert len(kept) == 1
    new.may_close.set()
    await kept.close()
    assert new.closing


async def test_one_that_holds_too_little_to_be_taken_is_ended() -> None:
    kept = KeptSessions(1, 600)
    short, session = fake(tokens=PROMPT[: MIN_SHARED_TOKENS - 1])
    short.may_close.set()
    await kept.keep(session)
    assert (short.closing, len(kept)) == (True, 0)


async def test_one_that_comes_back_when_all_were_ended_is_ended() -> None:
    kept = KeptSessions(2, 600)
    late, session = fake()
    late.may_close.set()
    await kept.close()
    await kept.keep(session)
    assert (late.closing, len(kept)) == (True, 0)
    assert kept.take(TERMS.artifact_id, PROMPT, Need(len(PROMPT))) is None

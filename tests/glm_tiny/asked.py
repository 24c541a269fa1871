"""What the tests ask glm-tiny: a sample of each kind of conversation, drawn once."""

from __future__ import annotations

from bench.glm_tiny.dialogue import Conversation, Effort
from bench.glm_tiny.facts import all_facts
from bench.glm_tiny.trial import conversations, questions

FACTS = all_facts()


def sample() -> dict[str, Conversation]:
    """Twelve conversations by a name for each: every format, one and several turns."""
    found = {}
    for number, effort in enumerate(Effort):
        for fact in FACTS[number * 7 :: 50][:3]:
            found[f"{effort.value}, {fact.name}"] = questions([fact], effort, [number])[0]
    for n_turns in (4, 5):  # longer than the indexer's top-k
        found[f"{n_turns} turns"] = conversations(FACTS, 2, n_turns, keep=True)[1]
    found["5 turns, thoughts cleared"] = conversations(FACTS, 1, 5, keep=False)[0]
    return found


def singles() -> list[Conversation]:
    """Forty questions, half of them without thinking."""
    return [*questions(FACTS[::7], Effort.MAX, [0])[:20], *questions(FACTS[3::7], Effort.NONE, [0])[:20]]

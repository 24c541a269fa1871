"""Whether tokens fit a context, and how many of them are in it already. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from swarm.errors import ContextExceeded


def check_context(n_prompt: int, max_tokens: int | None, context_tokens: int) -> None:
    """Raises ContextExceeded unless prompt and answer fit. Without ``max_tokens``, one token must fit."""
    needed = n_prompt + (max_tokens or 1)
    if needed > context_tokens:
        answer = f" and {max_tokens} tokens of answer" if max_tokens else ""
        advice = "shorten the prompt" + (" or lower --max-tokens" if max_tokens else "")
        raise ContextExceeded(
            f"the prompt of {n_prompt} tokens{answer} exceeds the chain's context of {context_tokens} tokens; {advice}"
        )


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))

"""What a node is about to do, said before it does it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from swarm.node.plan import Plan


class Fetching(Protocol):
    """The part of ``Parts`` that says what is to be fetched."""

    def intent(self, plan: Plan) -> str: ...

    def check_room(self, plan: Plan) -> None: ...


def intent(plan: Plan, parts: Fetching, *, runners_up: bool = False) -> Iterator[str]:
    """The choice, what is fetched for it, and the memory that it takes, a line each."""
    if plan.choice is not None:
        lines = plan.choice.explain()
        yield from lines if runners_up else lines[:1]
    fetched = parts.intent(plan)
    if fetched:
        yield f"disk: {fetched}"
    yield f"memory: {plan.describe()}"


def check(plan: Plan, parts: Fetching) -> None:
    """Raises NotEnoughMemory or StoreError when the plan can't be carried out."""
    plan.check_fits()
    parts.check_room(plan)

"""Who holds other bytes than others: digests of the same tensors, compared.

Where nobody has sealed the artifact it can't be told who is right, only that not everybody is; so what is found is the
sides of a disagreement, with the peers on each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SHOWN = 3  # names of tensors in a line

Digests = Mapping[str, str]  # of tensors, by name


@dataclass(frozen=True)
class Disagreement:
    """Tensors about which the same peers disagree. ``sides`` holds the peers with the same bytes, most peers first;
    ``wrong`` are those whose bytes a digest list contradicts, and empty without one."""

    tensors: tuple[str, ...]
    sides: tuple[tuple[str, ...], ...]
    wrong: frozenset[str] = frozenset()


def disagreements(held: Mapping[str, Digests], right: Digests | None = None) -> tuple[Disagreement, ...]:
    """By peer what it holds, compared tensor by tensor, and with ``right`` where it is known; most tensors first."""
    alike: defaultdict[tuple[tuple[tuple[str, ...], ...], frozenset[str]], list[str]] = defaultdict(list)
    for name in sorted({name for digests in held.values() for name in digests}):
        by_digest: defaultdict[str, list[str]] = defaultdict(list)
        for peer in sorted(held):
            if name in held[peer]:
                by_digest[held[peer][name]].append(peer)
        expected = None if right is None else right.get(name)
        wrong = _wrong(by_digest, expected)
        if len(by_digest) > 1 or wrong:
            sides = sorted((tuple(peers) for peers in by_digest.values()), key=lambda side: (-len(side), side))
            alike[tuple(sides), wrong].append(name)
    found = (Disagreement(tuple(names), sides, wrong) for (sides, wrong), names in alike.items())
    return tuple(sorted(found, key=lambda each: (-len(each.tensors), each.tensors)))


def some_tensors(names: Iterable[str]) -> str:
    """``tensor a``, ``tensors a, b``, or of many the first and how many more there are."""
    listed = sorted(names)
    shown = ", ".join(listed[:SHOWN])
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"{'tensor' if len(listed) == 1 else 'tensors'} {shown}{more}"


def _wrong(by_digest: Mapping[str, Iterable[str]], expected: str | None) -> frozenset[str]:
    if expected is None:
        return frozenset()
    return frozenset(peer for digest, peers in by_digest.items() if digest != expected for peer in peers)

"""Sizes as users write them."""

from __future__ import annotations

import re

from swarm.errors import UsageError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str, option: str, example: str = "20GiB", *, zero: bool = False) -> int:
    """Bytes. ``20GiB``, ``20G`` and ``20GB`` are all 20 x 2^30: nobody means the smaller one. Raises ``UsageError``."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE | re.ASCII)
    n_bytes = 0 if match is None else int(float(match[1]) * _UNITS[match[2].lower()])
    if match is None or (n_bytes == 0 and not zero):
        raise UsageError(f"{option} {text}: not a size; write for example {option} {example}")
    return n_bytes

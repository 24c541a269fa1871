"""Which identity file a node uses when the operator names none: the first of its model's that no other node holds."""

from __future__ import annotations

import re
from pathlib import Path

from dht.errors import IdentityInUse
from dht.identity import Identity

MOST = 256  # nodes of one model on one machine


def own_identity(given: Path | None, model: str, folder: Path) -> Identity:
    """Raises the errors of ``Identity.load_or_create``. Close what it returns."""
    if given is not None:
        return Identity.load_or_create(given)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[:64] or "node"
    for number in range(1, MOST):
        try:
            return Identity.load_or_create(folder / f"{stem}-{number}.key")
        except IdentityInUse:
            continue
    return Identity.load_or_create(folder / f"{stem}-{MOST}.key")

"""Which identity file a node uses when the operator names none: the first of its model's that no other node holds."""

from __future__ import annotations

import re
from pathlib import Path

from dht.errors import BadIdentity, IdentityInUse
from dht.identity import Identity

MOST = 256  # nodes of one model on one machine


def own_identity(given: Path | None, model: str, folder: Path) -> Identity:
    """Raises the errors of ``Identity.load_or_create``. Close what it returns."""
    if given is not None:
        return Identity.load_or_create(given)
    for number in range(1, MOST):
        try:
            return Identity.load_or_create(_path(model, folder, number))
        except IdentityInUse:
            continue
    return Identity.load_or_create(_path(model, folder, MOST))


def known_peer_id(given: Path | None, model: str, folder: Path) -> str:
    """Who a node on this machine is, or was when it last ran; "" where there was none. Nothing is made or locked."""
    try:
        return Identity.peer_id_in(_path(model, folder, 1) if given is None else given)
    except BadIdentity:
        return ""


def _path(model: str, folder: Path, number: int) -> Path:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[:64] or "node"
    return folder / f"{stem}-{number}.key"

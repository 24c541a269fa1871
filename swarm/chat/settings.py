"""Whom to join when no option says so: ``SWARM_PEERS``, else ``initial_peers`` of ``config.toml`` in the user's
config folder, which ``swarm-node`` reads as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dht.addresses import parse_peers
from dht.errors import BadAddress
from swarm.config_file import read_config
from swarm.errors import UsageError

PEERS_VARIABLE = "SWARM_PEERS"


def initial_peers(given: Sequence[str], environment: Mapping[str, str], path: Path) -> tuple[str, ...]:
    """Checked addresses, maybe none. Raises UsageError for one that can't be dialled."""
    try:
        return parse_peers(" ".join(given) or environment.get(PEERS_VARIABLE) or _configured(path))
    except BadAddress as error:
        raise UsageError(str(error)) from error


def _configured(path: Path) -> str:
    peers = read_config(path).get("initial_peers", [])
    if not isinstance(peers, list) or not all(isinstance(peer, str) for peer in peers):
        raise UsageError(f"{path}: initial_peers must be a list of texts; correct the file")
    return " ".join(peers)

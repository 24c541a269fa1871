"""Defaults from the environment and the user's configuration file, ``config.toml`` in the user's config folder:

model = "glm-5.2-ud-iq1_s"
initial_peers = ["/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW..."]
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from dht.addresses import parse_peers
from swarm.errors import UsageError

DEFAULT_MODEL = "glm-5.2-ud-iq1_s"


@dataclass(frozen=True)
class Settings:
    model: str = DEFAULT_MODEL
    initial_peers: tuple[str, ...] = ()


def config_path() -> Path:
    return Path(platformdirs.user_config_dir("glm-swarm")) / "config.toml"


def load_settings(environment: Mapping[str, str], path: Path) -> Settings:
    """The environment (``SWARM_MODEL``, ``SWARM_PEERS``) goes before the file. Raises UsageError, BadAddress."""
    document = _read(path)
    model = environment.get("SWARM_MODEL") or document.get("model", DEFAULT_MODEL)
    peers = environment.get("SWARM_PEERS") or document.get("initial_peers", [])
    if isinstance(peers, list):
        peers = " ".join(str(peer) for peer in peers)
    if not isinstance(model, str) or not isinstance(peers, str):
        raise UsageError(f"{path}: model must be a text and initial_peers a list of texts; correct the file")
    return Settings(model, parse_peers(peers))


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}; correct or remove the file") from error

"""``config.toml``, which programs read before their command lines: its keys are the options of ``swarm-node``, and
``swarm-chat`` reads ``initial_peers`` of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import platformdirs

from swarm.errors import UsageError


def config_path() -> Path:
    """The file that is read when no other one is named."""
    return Path(platformdirs.user_config_dir("glm-swarm")) / "config.toml"


def read_config(path: Path) -> dict[str, object]:
    """Empty when there is no such file. Raises ``UsageError`` for one that can't be read."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}; correct or remove the file") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise UsageError(f"{path} can't be read: {error}; correct or remove the file") from error

"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from swarm.errors import UsageError


def user_path(text: str) -> Path:
    """With the home folder for ``~``. Raises ``UsageError`` for the home of a user who does not exist."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text}: no such user's folder; write the path in full") from error


def exists(path: Path) -> bool:
    """False also for what can't be looked for: a name that is too long, a folder that can't be entered."""
    try:
        return path.exists()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """False also for what can't be looked for."""
    try:
        return path.is_dir()
    except OSError:
        return False


def printable(text: str) -> str:
    """One line for a terminal: a file's name must not send it control sequences."""
    return "".join(character if character.isprintable() else "�" for character in text)

"""What ``--source`` says, looked at before anything is opened or fetched. Loads no HTTP client."""

from __future__ import annotations

from urllib.parse import urlsplit

from swarm.artifact.local_path import is_folder, user_path
from swarm.errors import UsageError

HUB = "hub"


def checked_source(text: str) -> str:
    """``hub``, an http(s) URL, or the absolute path of a folder that is there. Raises ``UsageError``, which does not
    repeat an address: it may hold a password."""
    if text.strip().lower() == HUB:
        return HUB
    if "://" in text:
        if not _is_address(text):
            raise UsageError(
                f"--source: that is no http or https address; write {HUB}, a folder, or https://host/folder"
            )
        return text
    folder = user_path(text)
    if not is_folder(folder):
        raise UsageError(
            f"--source {text}: no such folder; write {HUB}, a folder, or an address that begins with https://"
        )
    return str(folder.absolute())


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets, or a port beyond 65535
        return False

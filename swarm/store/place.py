"""Where the parts of models are kept when the user names no folder."""

from __future__ import annotations

import re
from pathlib import Path

import platformdirs


def models_folder() -> Path:
    """In the user's data, not in the cache (which may be emptied) and not beside the program (which is replaced)."""
    return Path(platformdirs.user_data_dir("glm-swarm")) / "models"


def default_folder(name: str) -> Path:
    """Of one model alone. ``name`` is the catalog's, or the stem of a manifest's file."""
    return models_folder() / (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".")[:100] or "model")

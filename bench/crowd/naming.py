"""Records of one benchmark with several models: what they are called, and how their commands name the model."""

from __future__ import annotations

from pathlib import Path

from bench.glm_slice import slice_name


def is_slice(model: Path) -> bool:
    """Whether its layers have GLM-5.2's sizes (``bench.glm_slice``)."""
    return model.stem.startswith(slice_name(0).partition("0")[0])


def record_id(bench: str, model: Path) -> str:
    return f"{bench}-glm" if is_slice(model) else bench


def model_option(model: Path) -> str:
    """For a command; the default model needs none."""
    return f" --model {model.name}" if is_slice(model) else ""

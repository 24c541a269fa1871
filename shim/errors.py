"""Errors of the engine. ``shim`` knows nothing of ``swarm``; the node turns these into its own."""

from __future__ import annotations


class EngineError(Exception):
    """Base: the call failed and the engine goes on, unless the class says otherwise."""


class BadStep(EngineError):
    """A value of the step is out of range; nothing was changed."""


class BadConfig(EngineError):
    """A value of the engine's configuration is out of range, for example a span beyond the last layer."""


class StepGap(EngineError):
    """A row starts beyond what its slot holds."""


class SlotFull(EngineError):
    """A row's position is beyond its slot's capacity."""


class ModelError(EngineError):
    """The file is no GGUF, is truncated, or lacks tensors."""


class UnsupportedError(EngineError):
    """The architecture or an option has no span support."""


class EngineMemoryError(EngineError):
    """An allocation failed."""


class ComputeError(EngineError):
    """The graph failed; the slots it touched are empty now."""


class LoadCancelled(EngineError):
    """The progress callback asked to stop."""


class BuildError(EngineError):
    """The library is missing or could not be built."""


class EngineDied(EngineError):
    """The worker process is gone, and with it every slot's state. ``exit_code`` is negative for a signal;
    ``last_lines`` are the last lines it wrote to stderr."""

    def __init__(self, message: str, exit_code: int | None = None, last_lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.last_lines = last_lines

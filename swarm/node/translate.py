"""Errors of the floors below, as the user of a node meets them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dht.errors import BadAddress, ClockSkewed, DhtError
from shim.errors import EngineDied, EngineError, EngineMemoryError, ModelError, UnsupportedError
from swarm.errors import (
    ClockSkew,
    NetworkError,
    NotAModel,
    NotEnoughMemory,
    SwarmError,
    UnsupportedModel,
    UsageError,
)


@contextmanager
def as_swarm_error() -> Iterator[None]:
    """Raises ``SwarmError`` where the network or the engine raise their own."""
    try:
        yield
    except (DhtError, EngineError) as error:
        raise swarm_error(error) from error


def swarm_error(error: DhtError | EngineError) -> SwarmError:
    return _network_error(error) if isinstance(error, DhtError) else _engine_error(error)


def _network_error(error: DhtError) -> SwarmError:
    if isinstance(error, BadAddress):
        return UsageError(str(error))
    return ClockSkew(str(error)) if isinstance(error, ClockSkewed) else NetworkError(str(error))


def _engine_error(error: EngineError) -> SwarmError:
    match error:
        case ModelError():
            return NotAModel(f"the engine can't load the model: {error}; download it again")
        case UnsupportedError():
            return UnsupportedModel(f"the engine can't serve this model in spans: {error}; choose another model")
        case EngineMemoryError():
            return NotEnoughMemory(f"the engine found too little memory: {error}; name fewer layers or smaller --slots")
        case EngineDied():
            return SwarmError(f"loading failed, {error}; name fewer layers, or see more with --log-level debug")
        case _:
            return SwarmError(str(error))

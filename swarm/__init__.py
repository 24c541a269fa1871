"""glm-swarm: a peer-to-peer runtime for GGUF models too big for one machine.

    async with swarm.SwarmClient.connect(["/ip4/.../p2p/..."]) as client:
        print(await (await client.chat([{"role": "user", "content": "Hello"}])).finish())

Names load on first use: ``import swarm`` is quick, the network comes when a client connects.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.client import (
        Answer,
        ClientConfig,
        Generation,
        GenerationOptions,
        SamplingParams,
        SwarmClient,
        Thinking,
        Timeouts,
        Token,
        ToolCall,
    )
    from swarm.errors import (
        ArtifactError,
        ArtifactMismatch,
        ClockSkew,
        ContextExceeded,
        IncompatiblePeer,
        NetworkError,
        NodeFull,
        NoPeersGiven,
        NoRoute,
        PeerFailed,
        ProtocolError,
        SessionLost,
        SessionPoisoned,
        SwarmError,
        UsageError,
    )

__version__ = "0.1.0"

_CLIENT = (
    "Answer",
    "ClientConfig",
    "Generation",
    "GenerationOptions",
    "SamplingParams",
    "SwarmClient",
    "Thinking",
    "Timeouts",
    "Token",
    "ToolCall",
)
_ERRORS = (
    "ArtifactError",
    "ArtifactMismatch",
    "ClockSkew",
    "ContextExceeded",
    "IncompatiblePeer",
    "NetworkError",
    "NoPeersGiven",
    "NoRoute",
    "NodeFull",
    "PeerFailed",
    "ProtocolError",
    "SessionLost",
    "SessionPoisoned",
    "SwarmError",
    "UsageError",
)
_HOMES = {**dict.fromkeys(_CLIENT, "swarm.client"), **dict.fromkeys(_ERRORS, "swarm.errors")}

__all__ = [
    "Answer",
    "ArtifactError",
    "ArtifactMismatch",
    "ClientConfig",
    "ClockSkew",
    "ContextExceeded",
    "Generation",
    "GenerationOptions",
    "IncompatiblePeer",
    "NetworkError",
    "NoPeersGiven",
    "NoRoute",
    "NodeFull",
    "PeerFailed",
    "ProtocolError",
    "SamplingParams",
    "SessionLost",
    "SessionPoisoned",
    "SwarmClient",
    "SwarmError",
    "Thinking",
    "Timeouts",
    "Token",
    "ToolCall",
    "UsageError",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

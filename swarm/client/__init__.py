"""The client side of the swarm. Names load on first use, so that importing the package takes no time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.client.chain import ChainSession, StepAnswer, StepRequest, WantedRow
    from swarm.client.client import SwarmClient
    from swarm.client.config import ClientConfig, Timeouts
    from swarm.client.generate import Generation, GenerationOptions
    from swarm.client.lasting import LastingSession
    from swarm.client.progress import StopReason, Token
    from swarm.client.reply import Answer, Reply, Thinking
    from swarm.client.sampler import GREEDY, SamplingParams
    from swarm.client.template import ChatTemplate
    from swarm.client.tool_calls import ToolCall

_HOMES = {
    "Answer": "swarm.client.reply",
    "GREEDY": "swarm.client.sampler",
    "ChainSession": "swarm.client.chain",
    "ChatTemplate": "swarm.client.template",
    "ClientConfig": "swarm.client.config",
    "Generation": "swarm.client.generate",
    "GenerationOptions": "swarm.client.generate",
    "LastingSession": "swarm.client.lasting",
    "Reply": "swarm.client.reply",
    "SamplingParams": "swarm.client.sampler",
    "StepAnswer": "swarm.client.chain",
    "StepRequest": "swarm.client.chain",
    "StopReason": "swarm.client.progress",
    "SwarmClient": "swarm.client.client",
    "Thinking": "swarm.client.reply",
    "Timeouts": "swarm.client.config",
    "Token": "swarm.client.progress",
    "ToolCall": "swarm.client.tool_calls",
    "WantedRow": "swarm.client.chain",
}

__all__ = [
    "GREEDY",
    "Answer",
    "ChainSession",
    "ChatTemplate",
    "ClientConfig",
    "Generation",
    "GenerationOptions",
    "LastingSession",
    "Reply",
    "SamplingParams",
    "StepAnswer",
    "StepRequest",
    "StopReason",
    "SwarmClient",
    "Thinking",
    "Timeouts",
    "Token",
    "ToolCall",
    "WantedRow",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

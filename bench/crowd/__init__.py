"""Many clients over a swarm whose nodes write down their engine calls, and the same calls again without a swarm."""

from bench.crowd.calls import Call, Part, calls_of, log_path
from bench.crowd.clients import Client, Crowd, crowd
from bench.crowd.replay import Replay

__all__ = ["Call", "Client", "Crowd", "Part", "Replay", "calls_of", "crowd", "log_path"]

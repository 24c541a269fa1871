"""Settings, which are texts and numbers, as the configuration of a node. Raises ``UsageError`` and ``BadAddress``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil

from dht.addresses import parse_peers
from swarm.artifact.local_path import user_path
from swarm.artifact.sizes import parse_size
from swarm.errors import NoPeersGiven, UsageError
from swarm.node import options
from swarm.node.config import Limits, ModelOptions, NetworkOptions, NodeConfig, Timeouts, Weights
from swarm.node.model_choice import Wanted, choose_model
from swarm.node.settings import Settings
from swarm.node.slots import parse_slots

MAX_PER_PEER = 1_000_000
MAX_THREADS = 512
MAX_NAME_CHARS = 128


def configure(settings: Settings, *, explain: bool = False) -> NodeConfig:
    """Also raises ``NotAModel``, for a model by name or path that is not there, and ``NoPeersGiven``."""
    network = NetworkOptions(
        initial_peers=_initial_peers(settings),
        listen=tuple(options.listen_multiaddr(text) for text in settings.listen or ("0.0.0.0:0",)),
        announce=tuple(options.announce_multiaddr(text) for text in settings.announce_maddrs),
        identity_path=_path(settings.identity),
        public_name=settings.public_name[:MAX_NAME_CHARS],
    )
    return NodeConfig(
        _model(settings),
        network,
        _timeouts(settings),
        _limits(settings),
        journal_folder=_path(settings.journal_dir),
        metrics=None if settings.metrics is None else options.metrics_address(settings.metrics),
        explain=explain,
    )


def _model(settings: Settings) -> ModelOptions:
    limit = settings.download_limit
    wanted = Wanted(
        model=settings.model,
        model_dir=_path(settings.model_dir),
        manifest=_path(settings.manifest),
        source=settings.source,
        data_dir=_path(settings.data_dir),
        bytes_per_second=None if limit is None else parse_size(limit, "--download-limit", "10MiB"),
        disk_reserve_bytes=parse_size(settings.disk_reserve, "--disk-reserve", "2GiB", zero=True),
    )
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    threads = options.count("--threads", settings.threads, 1, MAX_THREADS) or cores
    contexts = None if settings.slots is None else parse_slots(settings.slots)
    chunk_tokens = options.count("--chunk-tokens", settings.chunk_tokens, 1, options.MAX_CHUNK_TOKENS)
    kv_type = options.kv_type(settings.kv_type)
    memory = None if settings.memory is None else parse_size(settings.memory, "--memory", "20GiB")
    journal = parse_size(settings.journal_memory, "--journal-memory", "256MiB", zero=True)
    found = choose_model(wanted)  # last: it may look for files, or fetch a small one
    return ModelOptions(
        path=found.path,
        name=found.name,
        store=found.store,
        weights=Weights(settings.weights),
        layers=settings.layers,
        memory_bytes=memory,
        threads=threads,
        contexts=contexts,
        chunk_tokens=chunk_tokens,
        kv_type=kv_type,
        journal_bytes=journal,
        mtp=settings.mtp,
    )


def _timeouts(settings: Settings) -> Timeouts:
    drain_seconds = settings.drain_seconds
    if not 0 <= drain_seconds < float("inf"):
        raise UsageError(f"--drain-seconds {drain_seconds:g}: not a time from 0 on; choose 0 to leave at once")
    idle_seconds = options.seconds("--idle-seconds", settings.idle_seconds)
    longest = max(idle_seconds, Timeouts.longest_idle_seconds)
    return Timeouts(drain_seconds=drain_seconds, idle_seconds=idle_seconds, longest_idle_seconds=longest)


def _limits(settings: Settings) -> Limits:
    options.count("--sessions-per-peer", settings.sessions_per_peer, 1, MAX_PER_PEER)
    options.count("--opens-per-minute", settings.opens_per_minute, 1, MAX_PER_PEER)
    opens = replace(Limits.opens, of_peer=settings.opens_per_minute)
    return Limits(sessions_per_peer=settings.sessions_per_peer, opens=opens)


def _initial_peers(settings: Settings) -> tuple[str, ...]:
    peers = parse_peers(" ".join(settings.initial_peers))
    if settings.new_swarm and peers:
        raise UsageError("--new-swarm and --initial-peers exclude each other; leave one of them out")
    if not peers and not settings.new_swarm:
        raise NoPeersGiven(
            "no peers given; join a swarm with: swarm-node --initial-peers ADDRESS, or start one with: "
            "swarm-node --new-swarm"
        )
    return peers


def _path(text: str | None) -> Path | None:
    return None if text is None else user_path(text)

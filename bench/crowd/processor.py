"""Processor time of a local swarm: on a machine that others use too, it says more than the time that passed."""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil

NETWORK = "p2pd"
PARTS = ("engines", "nodes", "network", "client")


def spent(node_pids: Iterable[int]) -> dict[str, float]:
    """Seconds so far by part: engines, nodes (their Python), libp2p daemons of all, and this process as the client."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for pid in node_pids:
        node = psutil.Process(pid)
        seconds["nodes"] += _own(node)
        for child in node.children(recursive=True):
            seconds["network" if child.name() == NETWORK else "engines"] += _own(child)
    own = psutil.Process(os.getpid())
    seconds["client"] = _own(own)
    seconds["network"] += sum(_own(child) for child in own.children() if child.name() == NETWORK)
    return seconds


def since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {part: after[part] - before[part] for part in PARTS}


def _own(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)

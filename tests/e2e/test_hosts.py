"""Nodes on hosts of their own, each with its own address: what works on one machine only would fail here."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from swarm.demo import QUESTION, SYSTEM
from swarm.local_swarm import ADDRESS, READY, NodeProcess
from tests.hosts import Host, hosts, require_namespaces

SPANS = ("0:10", "10:20", "20:30")


def test_three_nodes_and_a_client_on_four_hosts(smollm2_path: Path, tmp_path: Path) -> None:
    require_namespaces()
    with hosts(4) as (*machines, client), ExitStack() as running:
        address = _start(smollm2_path, machines, tmp_path, running)
        assert f"/ip4/{machines[0].address}/" in address
        answer = _ask(client, address, tmp_path)
    assert "Paris" in answer["answer"]
    assert [tuple(hop["layers"]) for hop in answer["route"]] == [(0, 10), (10, 20), (20, 30)]


def _start(model: Path, machines: list[Host], folder: Path, running: ExitStack) -> str:
    peers = ["--new-swarm"]
    nodes = []
    for host, layers in zip(machines, SPANS, strict=True):
        key = folder / f"{layers[0]}-{host.namespace}.key"
        arguments = ["--model", str(model), "--layers", layers, "--identity", str(key), *peers]
        node = NodeProcess(arguments, folder / f"{host.namespace}.log", prefix=host.prefix)
        running.callback(node.join)
        running.callback(node.stop)
        nodes.append(node)
        if len(nodes) == 1:
            peers = ["--initial-peers", node.wait_for(ADDRESS)[1]]
    for node in nodes:
        node.wait_for(READY)
    return peers[1]


def _ask(client: Host, address: str, folder: Path) -> dict[str, Any]:
    chat = [sys.executable, "-m", "swarm.chat.cli", "--initial-peers", address, "--greedy", "--json"]
    command = [*client.prefix, *chat, "--system", SYSTEM, "-p", QUESTION]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer

"""Nodes with a core of their own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil


def pin(node_pid: int, core: int) -> None:
    """The node, its engine and its libp2p daemon, with all threads that they have; those to come follow."""
    node = psutil.Process(node_pid)
    for process in [node, *node.children(recursive=True)]:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread.name), {core})

"""What can go wrong with a node, done to real processes and real connections."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import resource
import signal
from collections.abc import AsyncIterator

import psutil

from bench.faults.side_door import node_door
from bench.links import Shape
from bench.links.linked_swarm import LinkedNode, LinkedSwarm

GONE_SECONDS = 20.0  # for a killed process to be gone
LOG_BYTES = 4 << 10  # that a node may still write to its log when its disk is full
SLOW = Shape(delay_seconds=0.2, jitter_seconds=0.05, bytes_per_second=32e3)


class Fault(enum.Enum):
    KILL_NODE = enum.auto()  # kill -9; its libp2p daemon and its engine end with it
    KILL_ENGINE = enum.auto()  # alone: the node lives and starts another
    STOP_NODE = enum.auto()  # SIGSTOP: its connections stay and say nothing
    LINK_CUT = enum.auto()  # silent, in both directions
    LINK_RESET = enum.auto()  # every connection, once; new ones are possible at once
    LINK_SLOW = enum.auto()
    GARBAGE_FRAME = enum.auto()  # once, in the place of a step or an answer; needs a watched node
    JOURNAL_DISK_FULL = enum.auto()  # no file may outgrow the log; EFBIG, for ENOSPC needs a mount and so privileges
    DHT_PARTITION = enum.auto()  # between the node and all other nodes; clients see all


@contextlib.asynccontextmanager
async def injected(
    fault: Fault, swarm: LinkedSwarm, node: LinkedNode, *, slow: Shape = SLOW, sessions: int = 1
) -> AsyncIterator[None]:
    """The fault is there when the block begins; garbage comes once in each of so many ``sessions``. Its end mends what
    can be mended: what was killed stays dead."""
    others = [other for other in swarm.nodes if other is not node]
    match fault:
        case Fault.KILL_NODE:
            await kill_node(node)
        case Fault.KILL_ENGINE:
            engine = engine_of(node)
            engine.kill()
            await asyncio.to_thread(engine.wait, GONE_SECONDS)
        case Fault.STOP_NODE:
            _signal_all(node, signal.SIGSTOP)
        case Fault.LINK_CUT:
            node.link.cut()
        case Fault.LINK_RESET:
            await node.link.reset()
        case Fault.LINK_SLOW:
            before = node.link.up.shape
            node.link.shape(slow)
        case Fault.GARBAGE_FRAME:
            await node_door(node).garble(sessions)
        case Fault.JOURNAL_DISK_FULL:
            limits = resource.prlimit(node.pid, resource.RLIMIT_FSIZE)
            room = node.process.log.stat().st_size + LOG_BYTES
            resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (room, limits[1]))
        case Fault.DHT_PARTITION:
            swarm.partition([node], others)
    try:
        yield
    finally:
        match fault:
            case Fault.STOP_NODE:
                _signal_all(node, signal.SIGCONT)
            case Fault.LINK_CUT:
                node.link.heal()
            case Fault.LINK_SLOW:
                node.link.shape(before)
            case Fault.JOURNAL_DISK_FULL:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(node.pid, resource.RLIMIT_FSIZE, limits)
            case Fault.DHT_PARTITION:
                for other in others:
                    swarm.edge(node, other).heal()


async def kill_node(node: LinkedNode) -> None:
    """All its processes are gone when this returns."""
    family = _family(node)
    node.process.process.kill()
    await asyncio.to_thread(node.process.process.wait)
    _, alive = await asyncio.to_thread(
        psutil.wait_procs, family[1:], GONE_SECONDS
    )  # the kernel ends them with their parent
    if alive:
        raise RuntimeError(f"processes {[process.pid for process in alive]} outlived their node")


def engine_of(node: LinkedNode) -> psutil.Process:
    """The process of the node's engine. Raises psutil.NoSuchProcess while there is none."""
    for process in psutil.Process(node.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("shim.worker" in word for word in process.cmdline()):
                return process
    raise psutil.NoSuchProcess(node.pid, msg="the node has no engine now")


def _family(node: LinkedNode) -> list[psutil.Process]:
    """The node, then its children."""
    parent = psutil.Process(node.pid)
    return [parent, *parent.children(recursive=True)]


def _signal_all(node: LinkedNode, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in _family(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

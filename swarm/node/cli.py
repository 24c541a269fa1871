"""``swarm-node``: serve some layers of a model to a swarm."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import psutil

from dht.addresses import parse_peers
from dht.errors import BadAddress
from dht.record import NodeState
from swarm import __version__
from swarm.artifact.catalog import GLM52, NAMES
from swarm.errors import NoPeersGiven, SwarmError, UsageError
from swarm.node import options
from swarm.node.config import Limits, ModelOptions, NetworkOptions, NodeConfig, Timeouts, Weights
from swarm.node.console import BarConsole, PlainConsole
from swarm.node.files import raise_open_files_limit
from swarm.node.model_choice import Wanted, choose_model
from swarm.node.settings import DEFAULT_MODEL, Settings, config_path, load_settings
from swarm.node.slots import parse_slots

if TYPE_CHECKING:
    from swarm.node.node import SwarmNode

INTERRUPTED = 130
MAX_PER_PEER = 1_000_000

DESCRIPTION = "Serve a span of a GGUF model's layers to a peer-to-peer swarm."
EXAMPLES = """\
examples:
  first machine, with the first ten layers; prints the line for the next one:
    swarm-node --model model.gguf --layers 0:10 --new-swarm
  next machine, with the layers that the swarm needs most and that fit:
    swarm-node --model model.gguf --initial-peers /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW...
  the same with GLM-5.2, whose files lie in a folder:
    swarm-node --model glm-5.2-ud-iq1_s --model-dir /models/GLM-5.2 --initial-peers ADDRESS
  a fixed port, 20 GiB at most, eight sessions of 4,096 tokens and two of 65,536:
    swarm-node --model model.gguf --listen 0.0.0.0:4001 --memory 20GiB --slots 8x4096,2x65536

SWARM_MODEL and SWARM_PEERS in the environment stand for --model and --initial-peers; so do model and initial_peers in
{config}. SIGINT, SIGTERM or SIGHUP lets running sessions move to other nodes or finish first,
a second one leaves at once.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        given = _parser().parse_args(arguments)
        _set_up_logging(given.log_level)
        return _run(given)
    except SwarmError as error:
        return _complain(error, error.exit_code)
    except BadAddress as error:
        return _complain(error, UsageError.exit_code)
    except KeyboardInterrupt:  # before the handlers are in place
        return INTERRUPTED


def _complain(error: Exception, code: int) -> int:
    print(f"swarm-node: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def _run(given: argparse.Namespace) -> int:
    raise_open_files_limit()
    settings = load_settings(os.environ, config_path())
    config = _config(given, settings)
    console = _console(given, config)
    try:
        return asyncio.run(_explain(config, console) if config.explain else _serve(config, console))
    finally:
        console.close()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="swarm-node",
        description=DESCRIPTION,
        epilog=EXAMPLES.format(config=config_path()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("what to serve").add_argument
    add(
        "--model",
        metavar="NAME|PATH",
        help=f"{', '.join(NAMES)}, or a GGUF file; of a split set, any of its files (default: {DEFAULT_MODEL})",
    )
    add(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help=f"folder with the files of {GLM52.name}, which are served from there (default: {GLM52.variable} in the "
        "environment; without either, this node's part is fetched)",
    )
    add(
        "--source",
        metavar="hub|URL|DIR",
        help="where this node's part of the model is fetched from (default: SWARM_SOURCE in the environment, else the "
        "model's own hub)",
    )
    add("--manifest", type=Path, metavar="FILE", help="fetch a model that has no name here, see swarm-artifact inspect")
    add("--data-dir", type=Path, metavar="DIR", help="folder of what is fetched, of one model (default: user's data)")
    add("--download-limit", metavar="SIZE", help="bytes a second that fetching may take, for example 10MiB")
    add("--disk-reserve", default="2GiB", metavar="SIZE", help="left free on that disk (default: %(default)s)")
    add(
        "--weights",
        default=Weights.MAPPED,
        choices=[str(how) for how in Weights],
        help="how weights are held in memory: read on first use, read before serving, or never dropped again",
    )
    add(
        "--layers", default="auto", metavar="A:B|auto", help="layers A to B-1; auto: the ones the swarm lacks (default)"
    )
    add(
        "--memory",
        metavar="SIZE",
        help="what weights, KV and buffers may take, for example 20GiB (default: what is free)",
    )
    add(
        "--slots",
        metavar="NxTOKENS,...",
        help="sessions and their length, for example 8x4096,2x65536 (default: by memory)",
    )
    add("--chunk-tokens", type=int, metavar="N", help="largest prefill chunk (default: what takes about a second)")
    add(
        "--kv-type",
        default="f16",
        metavar="TYPE",
        help=f"element type of the KV cache: {', '.join(options.KV_TYPES)} (default: %(default)s); q8_0 takes half of "
        "f16 and changes some tokens: evidence/agreement.json",
    )
    add(
        "--journal-memory",
        default="256MiB",
        metavar="SIZE",
        help="what is kept in memory to feed a hop that takes another's place; the rest goes to a file "
        "(default: %(default)s)",
    )
    add("--journal-dir", type=Path, metavar="PATH", help="folder of that file (default: in the user's cache)")
    add("--mtp", action="store_true", help="draft tokens with the model's MTP block; for the layers up to the last one")
    add("--threads", type=int, metavar="N", help="threads of the engine (default: one per core)")
    add("--explain", action="store_true", help="say which layers would be chosen and why, and end")
    add = parser.add_argument_group("the swarm").add_argument
    add("--initial-peers", nargs="+", metavar="ADDRESS", help="nodes of the swarm to join")
    add("--new-swarm", action="store_true", help="start a swarm of its own and print the line for the next machine")
    add("--listen", action="append", metavar="HOST:PORT", help="or a multiaddr (default: all interfaces, a free port)")
    add(
        "--announce-maddrs",
        action="append",
        metavar="MULTIADDR",
        help="tell others this address instead of the local ones",
    )
    add(
        "--identity",
        type=Path,
        metavar="PATH",
        help="key file (default: a free one of this model's in the user's data)",
    )
    add(
        "--public-name", default="", metavar="TEXT", help="public name, shown to the users of the swarm (default: none)"
    )
    add = parser.add_argument_group("running").add_argument
    add(
        "--drain-seconds",
        type=float,
        default=Timeouts.drain_seconds,
        metavar="S",
        help="how long running sessions may take to move or to finish when leaving (default: %(default)g)",
    )
    add(
        "--idle-seconds",
        type=float,
        default=Timeouts.idle_seconds,
        metavar="S",
        help="a session that has computed nothing for so long gives its slot to another one (default: %(default)g)",
    )
    add(
        "--sessions-per-peer",
        type=int,
        default=Limits.sessions_per_peer,
        metavar="N",
        help="sessions that one client may have open (default: %(default)s)",
    )
    add(
        "--opens-per-minute",
        type=int,
        default=Limits.opens.of_peer,
        metavar="N",
        help="sessions that one client may open in a minute (default: %(default)s)",
    )
    add(
        "--metrics",
        metavar="HOST:PORT",
        help="page for Prometheus; without a host, for this machine only (default: none)",
    )
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="default: warning")
    add("--version", action="version", version=f"%(prog)s {__version__}")
    add("--no-color", action="store_true", help="no colours on a terminal; NO_COLOR in the environment does the same")
    return parser


def _set_up_logging(level: str) -> None:
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form, stream=sys.stderr)


def _config(given: argparse.Namespace, settings: Settings) -> NodeConfig:
    network = NetworkOptions(
        initial_peers=_initial_peers(given, settings),
        listen=tuple(options.listen_multiaddr(text) for text in given.listen or ("0.0.0.0:0",)),
        announce=tuple(given.announce_maddrs or ()),
        identity_path=given.identity,
        public_name=given.public_name[:128],
    )
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    found = choose_model(_wanted(given, settings))
    model = ModelOptions(
        path=found.path,
        name=found.name,
        store=found.store,
        weights=Weights(given.weights),
        layers=given.layers,
        memory_bytes=None if given.memory is None else options.memory_bytes(given.memory),
        threads=options.count("--threads", given.threads, 1, 512) or cores,
        contexts=None if given.slots is None else parse_slots(given.slots),
        chunk_tokens=options.count("--chunk-tokens", given.chunk_tokens, 1, 1 << 14),
        kv_type=options.kv_type(given.kv_type),
        journal_bytes=options.memory_bytes(given.journal_memory, "--journal-memory", zero=True),
        mtp=given.mtp,
    )
    return NodeConfig(
        model,
        network,
        _timeouts(given),
        _limits(given),
        journal_folder=given.journal_dir,
        metrics=None if given.metrics is None else options.metrics_address(given.metrics),
        explain=given.explain,
    )


def _wanted(given: argparse.Namespace, settings: Settings) -> Wanted:
    limit = given.download_limit
    return Wanted(
        model=given.model or settings.model,
        model_dir=given.model_dir,
        manifest=given.manifest,
        source=given.source,
        data_dir=given.data_dir,
        bytes_per_second=None if limit is None else options.memory_bytes(limit, "--download-limit"),
        disk_reserve_bytes=options.memory_bytes(given.disk_reserve, "--disk-reserve", zero=True),
    )


def _timeouts(given: argparse.Namespace) -> Timeouts:
    if given.drain_seconds < 0:
        raise UsageError(f"--drain-seconds {given.drain_seconds:g}: below 0; choose 0 to leave at once")
    idle_seconds = options.seconds("--idle-seconds", given.idle_seconds)
    longest = max(idle_seconds, Timeouts.longest_idle_seconds)
    return Timeouts(drain_seconds=given.drain_seconds, idle_seconds=idle_seconds, longest_idle_seconds=longest)


def _limits(given: argparse.Namespace) -> Limits:
    options.count("--sessions-per-peer", given.sessions_per_peer, 1, MAX_PER_PEER)
    options.count("--opens-per-minute", given.opens_per_minute, 1, MAX_PER_PEER)
    opens = replace(Limits.opens, of_peer=given.opens_per_minute)
    return Limits(sessions_per_peer=given.sessions_per_peer, opens=opens)


def _initial_peers(given: argparse.Namespace, settings: Settings) -> tuple[str, ...]:
    named = None if given.initial_peers is None else parse_peers(" ".join(given.initial_peers))
    if given.new_swarm:
        if named:
            raise UsageError("--new-swarm and --initial-peers exclude each other; leave one of them out")
        return ()
    peers = settings.initial_peers if named is None else named
    if not peers:
        raise NoPeersGiven(
            "no peers given; join a swarm with: swarm-node --initial-peers ADDRESS, or start one with: "
            "swarm-node --new-swarm"
        )
    return peers


def _console(given: argparse.Namespace, config: NodeConfig) -> PlainConsole:
    def on_joined(addresses: Sequence[str]) -> str | None:
        if not given.new_swarm or not addresses:
            return None
        model = shlex.quote(given.model or config.model.name or str(config.model.path))
        return f"next machine: swarm-node --model {model} --initial-peers {addresses[0]}"

    if sys.stderr.isatty():
        return BarConsole(on_joined, sys.stderr, color=not (given.no_color or os.environ.get("NO_COLOR")))
    return PlainConsole(on_joined)


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as every other error of the program."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see swarm-node --help")


class _Signals:
    """The first signal asks to leave, every further one to be quick about it."""

    def __init__(self, serving: asyncio.Task[int]) -> None:
        self._serving = serving
        self.leave = asyncio.Event()
        self.ready = False
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._arrived)
        loop.add_signal_handler(signal.SIGTERM, self._arrived)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            loop.add_signal_handler(signal.SIGHUP, self._arrived)

    def _arrived(self) -> None:
        if self.leave.is_set() or not self.ready:
            self._serving.cancel()
        self.leave.set()


async def _explain(config: NodeConfig, console: PlainConsole) -> int:
    from swarm.node.explain import explain

    await explain(config, console)
    return 0


async def _serve(config: NodeConfig, console: PlainConsole) -> int:
    from swarm.node.node import SwarmNode  # the protocol and the engine's types take a moment to import

    serving = asyncio.current_task()
    assert serving is not None
    signals = _Signals(serving)
    try:
        async with SwarmNode(config, console) as node:
            console.close()
            console.line(await _ready_line(node))
            signals.ready = True
            await _until_told(node, signals, console)
    except asyncio.CancelledError:
        return 0 if signals.ready else INTERRUPTED
    return 0


async def _until_told(node: SwarmNode, signals: _Signals, console: PlainConsole) -> None:
    leave = asyncio.create_task(signals.leave.wait())
    ended = asyncio.create_task(node.wait())
    try:
        await asyncio.wait([leave, ended], return_when=asyncio.FIRST_COMPLETED)
        if leave.done():
            console.line("leaving: no new sessions are taken; a second signal leaves at once")
            await node.drain()
    finally:
        leave.cancel()
        ended.cancel()
        with suppress(asyncio.CancelledError, SwarmError):
            await ended  # its error is raised by the node itself


async def _ready_line(node: SwarmNode) -> str:
    from swarm.placement import coverage_of

    records = [record for record in await node.records() if record.state == NodeState.ONLINE]
    manifest = node.manifest
    others = sum(record.peer_id != node.peer_id for record in records)
    coverage = coverage_of(records, manifest.cuts, manifest.artifact_id)
    coverage = coverage.plus(*node.span)
    lacking = ", ".join(f"{first}:{last}" for first, last in coverage.uncovered)
    rest = f"; nobody serves {lacking} yet" if lacking else "; every layer is served"
    first, last = node.span
    peers = "1 other peer" if others == 1 else f"{others} other peers"
    return f"ready: serving layers {first}:{last} of {manifest.name} with {peers}{rest}"


if __name__ == "__main__":
    sys.exit(main())

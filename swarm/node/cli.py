"""``swarm-node``: serve some layers of a model to a swarm."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dht.errors import BadAddress
from dht.record import NodeState
from swarm.config_file import config_path
from swarm.errors import SwarmError, UsageError
from swarm.node.arguments import PROG, parse
from swarm.node.config import NodeConfig
from swarm.node.config_text import config_text
from swarm.node.configure import configure
from swarm.node.console import BarConsole, PlainConsole
from swarm.node.files import raise_open_files_limit
from swarm.node.gather import Gathered, gather
from swarm.node.machines import plan_lines
from swarm.node.settings import Settings, from_folder
from swarm.node.unit import Call, unit_text

if TYPE_CHECKING:
    from swarm.node.node import SwarmNode

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return _run(parse(arguments))
    except SwarmError as error:
        return _complain(error, error.exit_code)
    except BadAddress as error:
        return _complain(error, UsageError.exit_code)
    except KeyboardInterrupt:  # before the handlers are in place
        return INTERRUPTED


def _complain(error: Exception, code: int) -> int:
    print(f"{PROG}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def _run(given: argparse.Namespace) -> int:
    flags = vars(given)
    named: Path | None = flags.get("config")
    gathered = gather(flags, os.environ, named or config_path(), named=named is not None)
    if flags.get("print_config"):
        print(config_text(_from_here(gathered)), end="")
        return 0
    if "plan" in flags:
        print("\n".join(plan_lines(gathered.settings, flags["plan"])))
        return 0
    try:
        config = configure(gathered.settings, explain="explain" in flags)
    except UsageError as error:
        raise gathered.located(error) from error
    if "print_unit" in flags:
        print(unit_text(_call(gathered, named), gathered.settings, system=flags["print_unit"] == "system"), end="")
        return 0
    return _serve_to_the_end(config, gathered.settings)


def _from_here(gathered: Gathered) -> dict[str, object]:
    """What is set, with paths as they read from anywhere."""
    outside = {key: from_folder(key, value, Path.cwd()) for key, value in gathered.outside.items()}
    return {**gathered.in_file, **outside}


def _call(gathered: Gathered, config: Path | None) -> Call:
    return Call(
        interpreter=sys.executable,
        given=gathered.outside,
        config=config,
        environment=os.environ,
        folder=Path.cwd(),
        user=getpass.getuser(),
        systemd_version=_systemd_version(),
    )


def _systemd_version() -> int:
    """Of this machine, 0 when it has none."""
    try:
        done = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, timeout=10, check=False)
        return int(done.stdout.split()[1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return 0


def _serve_to_the_end(config: NodeConfig, settings: Settings) -> int:
    _set_up_logging(settings.log_level)
    raise_open_files_limit()
    console = _console(config, settings)
    try:
        return asyncio.run(_explain(config, console) if config.explain else _serve(config, console))
    finally:
        console.close()


def _set_up_logging(level: str) -> None:
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form, stream=sys.stderr)


def _console(config: NodeConfig, settings: Settings) -> PlainConsole:
    def on_joined(addresses: Sequence[str]) -> str | None:
        if not settings.new_swarm or not addresses:
            return None
        return f"next machine: {PROG} {_naming_the_model(config, settings)} --initial-peers {addresses[0]}"

    if sys.stderr.isatty():
        return BarConsole(on_joined, sys.stderr, color=not (settings.no_color or os.environ.get("NO_COLOR")))
    return PlainConsole(on_joined)


def _naming_the_model(config: NodeConfig, settings: Settings) -> str:
    """The options by which another machine serves the same model; the hub is everybody's, other sources may be."""
    if settings.manifest is not None:
        named = ["--manifest", settings.manifest]
    else:
        named = ["--model", config.model.name or settings.model]
    if settings.source is not None:
        named += ["--source", settings.source]
    return shlex.join(named)


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
        if signals.ready:
            return 0
        _say_what_is_kept(config)
        return INTERRUPTED
    return 0


def _say_what_is_kept(config: NodeConfig) -> None:
    store = config.model.store
    if store is not None and store.folder.is_dir():
        kept = f"what was fetched is kept in {store.folder}, the same command goes on from there"
        print(f"{PROG}: interrupted; {kept}", file=sys.stderr, flush=True)


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
    from swarm.node.completeness import spans_text
    from swarm.placement.choice import coverage_of

    records = [record for record in await node.records() if record.state == NodeState.ONLINE]
    manifest = node.manifest
    others = sum(record.peer_id != node.peer_id for record in records)
    coverage = coverage_of(records, manifest.cuts, manifest.artifact_id)
    coverage = coverage.plus(*node.span)
    lacking = spans_text(coverage.uncovered)
    rest = f"; nobody serves {lacking} yet" if lacking else "; every layer is served"
    first, last = node.span
    peers = "1 other peer" if others == 1 else f"{others} other peers"
    what = f"{manifest.name} ({manifest.artifact_id[:12]})"
    return f"ready: serving layers {first}:{last} of {what} with {peers}{rest}"


if __name__ == "__main__":
    sys.exit(main())

"""``python -m bench.failover``: what deaths of nodes cost an answer, and what they cost one that begins again."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.failover.deaths import DEATHS
from bench.failover.long import LONG
from bench.failover.part import Part, record_of, setting_of
from bench.failover.pause import PAUSE
from bench.failover.rates import RATES
from bench.failover.stage import stage
from bench.record import EVIDENCE, Record
from swarm.artifact import embedded
from swarm.errors import SwarmError

PARTS = (DEATHS, PAUSE, LONG, RATES)
EPILOG = """\
examples:
  the pause of a kill -9 and its parts, in a minute or two:
    python -m bench.failover pause
  all parts, a quarter of an hour on two quiet cores; writes evidence/failover-*.json:
    python -m bench.failover all --record
  a look at the shape of random deaths, quickly:
    python -m bench.failover rates --rates 0 0.01 --total 512

Six nodes take about 2.5 GiB. Figures go to stdout, progress to stderr. Ctrl-C ends every node.
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.failover",
        description="Kills nodes (kill -9) under an answer and measures what that costs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="part", required=True, metavar="PART")
    for part in PARTS:
        command = commands.add_parser(part.name, help=part.help, description=part.help)
        _add_common(command)
        part.add_options(command)
    _add_common(commands.add_parser("all", help="every part with its defaults, one after the other"))
    return made


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", type=Path, help="GGUF file (default: SmolLM2-135M)")
    command.add_argument("--hops", type=int, default=3, help="spans of the chain (default: %(default)s)")
    command.add_argument("--replicas", type=int, default=2, help="nodes of each span (default: %(default)s)")
    command.add_argument("--threads", type=int, default=1, help="of each engine (default: %(default)s)")
    command.add_argument("--slots", type=int, default=2, help="of each node (default: %(default)s)")
    command.add_argument("--chunk-tokens", type=int, default=128, help="of a prefill step (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of prompts and deaths (default: %(default)s)")
    command.add_argument(
        "--record",
        type=Path,
        nargs="?",
        const=EVIDENCE,
        metavar="FOLDER",
        help="write failover-PART.json (default folder: evidence/)",
    )


async def run(part: Part, options: argparse.Namespace) -> Record:
    async with stage(setting_of(part, options)) as made:
        return record_of(part, options, made, await part.measure(made, options))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.replicas < 2:
        parser().error("--replicas must be 2 or more: somebody has to take over")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # they end the nodes, as Ctrl-C does
    options.model = options.model or embedded.fetch()
    for part in PARTS:
        if options.part in (part.name, "all"):
            try:
                _measure(part, options)
            except SwarmError as error:
                print(f"failover: {error}", file=sys.stderr)
                return error.exit_code
            except KeyboardInterrupt:
                return 130
    return 0


def _measure(part: Part, options: argparse.Namespace) -> None:
    given = argparse.ArgumentParser(add_help=False)
    part.add_options(given)
    defaults = vars(given.parse_args([]))
    record = asyncio.run(run(part, argparse.Namespace(**{**defaults, **vars(options)})))
    print(f"{part.help}:\n{part.report(record)}\n", flush=True)
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        print(f"recorded in {record.write(options.record)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

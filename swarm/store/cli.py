"""``swarm-artifact``: what a model is made of, which parts of it are here, and whether they are right."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from swarm import __version__
from swarm.artifact.catalog import GLM52, GLM_TINY, NAMES
from swarm.artifact.local_path import printable
from swarm.errors import SwarmError, UsageError
from swarm.store import (
    compare_command,
    fetch_command,
    gc_command,
    inspect_command,
    seal_command,
    status_command,
    verify_command,
)

PROG = "swarm-artifact"
INTERRUPTED = 130
BROKEN_PIPE = 141

DESCRIPTION = (
    "Shows what a model is made of, fetches the parts that some layers need, checks whether what is here is undamaged, "
    "and frees what is not needed any more."
)
EPILOG = f"""\
models by name: {", ".join(NAMES)}

examples:
  what {GLM52.name} is made of and where it may be cut; no files are needed:
    {PROG} inspect {GLM52.name}
  get the parts that some layers need, {GLM_TINY}'s from a folder for example; interrupted, the same command goes on:
    {PROG} fetch {GLM52.name} --layers 0:18
    {PROG} fetch {GLM_TINY} --layers 0:6 --source /models
  check downloaded files, first in seconds by their headers, then every byte:
    {PROG} verify --quick /models/GLM-5.2
    {PROG} verify /models/GLM-5.2
  check the model that comes with this program:
    {PROG} verify {GLM_TINY}
  write down what a model of your own is, and check a copy of it elsewhere:
    {PROG} inspect model.gguf --manifest-out model.json
    {PROG} verify /copy/model.gguf --manifest model.json
  see which layers were fetched, and free the others' room:
    {PROG} status {GLM52.name}
    {PROG} gc {GLM52.name} --keep 10:30
  check what was fetched, and fetch again what has changed on the disk, nothing else:
    {PROG} verify {GLM52.name} --repair
  let others check parts of a model of your own, tensor by tensor; beside model.json the list is found:
    {PROG} seal model.gguf -o model.digests.json
  see whether the nodes of a swarm hold the same bytes:
    {PROG} compare {GLM52.name} --initial-peers ADDRESS

exit codes: 0 all right, 2 wrong option, 3 files or their source unusable, or of another model, 4 wrong layers,
6 network, 7 nobody serves that model, 130 interrupted. {PROG} compare --help names its own.
"""


class Command(Protocol):
    """What a module of a subcommand has. ``run`` gives the exit code; its errors are ``SwarmError`` and ``OSError``."""

    NAME: str
    HELP: str

    def add(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, given: argparse.Namespace) -> int: ...


# in the order of --help; what a command needs beyond its options it imports when it runs
COMMANDS: tuple[Command, ...] = (
    inspect_command,
    fetch_command,
    status_command,
    verify_command,
    gc_command,
    seal_command,
    compare_command,
)
READING = (inspect_command.NAME, verify_command.NAME, seal_command.NAME)  # whole files
_BY_NAME = {command.NAME: command for command in COMMANDS}


def main(arguments: Sequence[str] | None = None) -> int:
    given = None
    try:
        given = _parser().parse_args(arguments)
        code = _BY_NAME[given.command].run(given)
        sys.stdout.flush()
        return code
    except SwarmError as error:
        print(f"{PROG}: {printable(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted; {_what_is_kept(given)}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has enough
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:  # models' own come as SwarmError
        _drop_output()
        what = f"{error.filename}: " if error.filename else "can't write the output: "
        print(f"{PROG}: {printable(what)}{error.strerror}; make room there, or choose another place", file=sys.stderr)
        return SwarmError.exit_code


def _what_is_kept(given: argparse.Namespace | None) -> str:
    if given is not None and given.command in READING:
        return "files read so far are remembered, the same command goes on with the next one"
    return "nothing is damaged by that, the same command does the rest"


def _drop_output() -> None:
    """What is left to write goes nowhere: writing it at the end would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as every other error of the program."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {PROG} --help")


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=PROG, description=DESCRIPTION, epilog=EPILOG, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(_BY_NAME))
    for command in COMMANDS:
        what = f"{command.HELP[0].upper()}{command.HELP[1:]}."
        command.add(commands.add_parser(command.NAME, help=command.HELP, description=what))
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""The command line of ``swarm-node``: every setting is an option, and some options are for one call. Imports nothing
heavy: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from swarm import __version__
from swarm.artifact.catalog import GLM52
from swarm.config_file import config_path
from swarm.errors import UsageError
from swarm.node.settings import GROUPS, extra, fields, flag

PROG = "swarm-node"
USAGE = f"{PROG} [options]"
DESCRIPTION = f"""\
Serves some layers of a model that is too big for one machine, together with others. To help a swarm, one command is
enough; ADDRESS is what its other nodes print, or what somebody who runs one has told you:

    {PROG} --initial-peers ADDRESS

It looks which layers of {GLM52.name} the swarm lacks and this machine can hold, says what it will fetch, fetches that
part alone, and serves it until Ctrl-C.
"""
EXAMPLES = """\
examples:
  see what would be chosen and fetched; nothing is:
    {prog} --initial-peers ADDRESS --explain
  at most 20 GiB of memory, 10 MiB a second of the line, on another disk:
    {prog} --initial-peers ADDRESS --memory 20GiB --download-limit 10MiB --data-dir /big/glm
  survive reboots: the text says how to install it:
    {prog} --initial-peers ADDRESS --print-unit
  behind a router that passes port 4001 on:
    {prog} --initial-peers ADDRESS --listen 0.0.0.0:4001 --announce-maddrs /ip4/203.0.113.9/tcp/4001
  start a swarm, with a model that is here; prints the line for the next machine:
    {prog} --model model.gguf --layers 0:10 --new-swarm

Every option but those for one call is a key of the file as well, with _ for -, and {prog} --print-config writes one:
initial_peers = ["ADDRESS"]. The order is: command line, environment, file.
SIGINT, SIGTERM or SIGHUP lets running sessions move to other nodes or finish first, a second one leaves at once.

exit codes: 0 left when asked to, 2 wrong option, 3 model or its source unusable, 4 wrong layers, 5 not enough memory,
6 network, 130 interrupted before it served.
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Only what was given is there. Raises ``UsageError``; ``--help`` and ``--version`` end the program."""
    return _parser().parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as every other error of the program."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{self._nearest(message)}; see {PROG} --help")

    def _nearest(self, message: str) -> str:
        before, unknown, rest = message.partition("unrecognized arguments: ")
        if before or not unknown:
            return ""
        option = rest.split()[0].partition("=")[0]
        close = difflib.get_close_matches(option, self._option_string_actions, 1, 0.75)
        return f"; did you mean {close[0]}" if close else ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG,
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EXAMPLES.format(prog=PROG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,  # what a unit or a script says must mean the same with the next version
    )
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for key, field in fields().items():
        _add(groups[extra(field)["group"]], key, field)
    _add_commands(parser.add_argument_group("for one call"))
    return parser


def _add(group: argparse._ArgumentGroup, key: str, field: FieldInfo) -> None:
    said: dict[str, Any] = {"help": (field.description or "").replace("%", "%%")}
    kinds = (field.annotation, *get_args(field.annotation))
    if field.annotation is bool:
        negative = key.startswith("no_")
        group.add_argument(flag(key), action="store_true" if negative else argparse.BooleanOptionalAction, **said)
        return
    if isinstance(field.default, tuple):
        said |= {"nargs": "+", "action": "extend"}
    elif int in kinds or float in kinds:
        said["type"] = int if int in kinds else float
    elif get_origin(field.annotation) is Literal:
        said["choices"] = get_args(field.annotation)
    group.add_argument(flag(key), metavar=extra(field)["metavar"], **said)


def _add_commands(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-h", "--help", action="help", help="show this text")
    add("--explain", action="store_true", help="show which layers would be chosen and why, and end; changes nothing")
    add(
        "--plan",
        metavar="MACHINES",
        help="show which layers machines of one owner would serve, for example 5x64GiB,128GiB, and end",
    )
    add("--config", type=Path, metavar="FILE", help=f"file with settings (default: {config_path()})")
    add("--print-config", action="store_true", help="print these settings as such a file, with all keys, and end")
    add(
        "--print-unit",
        nargs="?",
        const="user",
        choices=("user", "system"),
        help="print a systemd unit for this command line, and how to install it: of a user (default) or of the system",
    )
    add("--version", action="version", version=f"%(prog)s {__version__}")

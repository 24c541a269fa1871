"""From command line, environment and file to one ``Settings``: what comes first in that order wins, key by key.

Two keys that exclude each other may come from different places, and then the first of these decides as well: a
``--new-swarm`` overrules the file's ``initial_peers``. So it is with keys that belong to one model: a ``--model`` of
another name leaves the file's folders for the model there alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from swarm.artifact.catalog import PINNED
from swarm.config_file import read_config
from swarm.errors import UsageError
from swarm.node.settings import DEFAULT_MODEL, Settings, fields, flag, from_folder

MODEL_VARIABLE = "SWARM_MODEL"
PEERS_VARIABLE = "SWARM_PEERS"
SOURCE_VARIABLE = "SWARM_SOURCE"
COMMANDS = ("config", "explain", "plan", "print_config", "print_unit", "version", "help")  # of one call, not settings
_EXCLUDING = (("initial_peers", "new_swarm"), ("model_dir", "source"), ("model", "manifest"))
_OF_A_MODEL = ("model_dir", "source", "data_dir", "manifest", "layers")

Values = dict[str, object]


@dataclass(frozen=True)
class Gathered:
    """``outside`` is what command line and environment say, ``in_file`` what was taken from ``file``."""

    settings: Settings
    outside: Values
    in_file: Values
    file: Path

    def located(self, error: UsageError) -> UsageError:
        """The same error, with the file where the option it begins with was set there."""
        key = str(error).split(" ", 1)[0].removeprefix("--").replace("-", "_")
        return UsageError(f"{error} ({key} is set in {self.file})") if key in self.in_file else error


def gather(given: Mapping[str, object], environment: Mapping[str, str], file: Path, *, named: bool) -> Gathered:
    """``given`` holds the options of the command line. ``named``: ``file`` must be there. Raises ``UsageError``."""
    if named and file.is_dir():
        raise UsageError(f"--config {file}: a folder; name the file in it, or leave --config out")
    if named and not file.is_file():
        raise UsageError(f"--config {file}: no such file; write one with: swarm-node --print-config > {file}")
    in_file = _from_file(file)
    flags = {key: _frozen(value) for key, value in given.items() if key in fields()}
    taken = _without_overruled(in_file, flags, _from_environment(environment, in_file, flags))
    values: Values = {key: value for place in taken for key, value in place.items()}
    if "model" in values and "manifest" in values:
        raise UsageError("--model and --manifest exclude each other; leave one of them out")
    outside = {**taken[1], **taken[2]}
    kept = {key: value for key, value in taken[0].items() if key not in outside}
    return Gathered(Settings(**values), outside, kept, file)  # type: ignore[arg-type]


def _from_file(path: Path) -> Values:
    document = read_config(path)
    for key in document:
        if key not in fields():
            raise UsageError(f"{path}: {_unknown(key)}")
    values = {key: _frozen(value) for key, value in document.items()}
    try:
        Settings(**values)  # type: ignore[arg-type]
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise UsageError(
            f"{path}: {key} must be {_kind(key)}, not {document[key]!r}; correct the file, or leave the key out"
        ) from None
    return {key: from_folder(key, value, path.parent) for key, value in values.items()}


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _unknown(key: str) -> str:
    plain = key.replace("-", "_").lower()
    if plain in COMMANDS:
        return f"{key} is for one call; remove it from the file, and write {flag(plain)} on the command line"
    close = difflib.get_close_matches(plain, fields(), 1, 0.5)
    nearest = f"did you mean {close[0]}?" if close else "remove it"
    return f"there is no key {key}; {nearest} (swarm-node --print-config lists all keys)"


def _kind(key: str) -> str:
    kind: Any = fields()[key].annotation
    if isinstance(fields()[key].default, tuple):
        return "a list of texts"
    if kind in (int, float, bool) or int in get_args(kind):
        return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a whole number")
    choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
    return f"one of {', '.join(choices)}" if choices else "a text in quotes"


def _from_environment(environment: Mapping[str, str], in_file: Values, flags: Values) -> Values:
    values: Values = {}
    if environment.get(MODEL_VARIABLE):
        values["model"] = environment[MODEL_VARIABLE]
    peers = environment.get(PEERS_VARIABLE, "").replace(",", " ").split()
    if peers:
        values["initial_peers"] = tuple(peers)
    chosen = {"model": DEFAULT_MODEL, **in_file, **values, **flags}
    pinned = PINNED.get(str(chosen["model"]).lower())
    folder = None if pinned is None or "manifest" in chosen else pinned.configured_folder(environment)
    if folder is not None:
        values["model_dir"] = str(folder)
    elif environment.get(SOURCE_VARIABLE) and (pinned is not None or "manifest" in chosen):
        values["source"] = environment[SOURCE_VARIABLE]  # a small model that is here needs none
    return values


def _without_overruled(in_file: Values, flags: Values, environment: Values) -> tuple[Values, Values, Values]:
    """File, environment and command line, each without what a later one excludes."""
    if _another_model(in_file, {**environment, **flags}):
        in_file = {key: value for key, value in in_file.items() if key not in _OF_A_MODEL}
    places = [in_file, environment, flags]
    for pair in _EXCLUDING:
        for low in (1, 0):
            above: Values = {key: value for place in places[low + 1 :] for key, value in place.items()}
            for one, other in (pair, pair[::-1]):
                if above.get(one) and not above.get(other):
                    places[low] = {key: value for key, value in places[low].items() if key != other}
    return places[0], places[1], places[2]


def _another_model(in_file: Values, above: Values) -> bool:
    if "manifest" in above:
        return True
    return "model" in above and "model" in in_file and above["model"] != in_file["model"]

"""``swarm-artifact verify``: whether files are those of the model they should be."""

from __future__ import annotations

import argparse
from pathlib import Path

from swarm.artifact.catalog import GLM52, KNOWN, NAMES, PINNED, named
from swarm.artifact.local_copy import check_copy
from swarm.artifact.local_path import exists, user_path
from swarm.artifact.progress import reading
from swarm.artifact.verify import find_target
from swarm.errors import ArtifactMismatch, UsageError
from swarm.store.find import Stored, find_stored, has_parts
from swarm.store.lists import find_digests
from swarm.store.piece_state import SUFFIX
from swarm.store.place import default_folder
from swarm.store.say import say
from swarm.store.whole import bytes_to_read, verify_whole

NAME = "verify"
HELP = "check files against the manifest of the model they should be"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="DIR|FILE|NAME",
        help=f"folder with the files, or one of them, or the name of a model ({GLM52.name}: in {GLM52.variable})",
    )
    parser.add_argument(
        "--model", metavar="NAME", help=f"which of {', '.join(NAMES)} it should be (default: told by the files)"
    )
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="what it should be, from inspect --manifest-out")
    parser.add_argument("--quick", action="store_true", help="sizes and headers only, which takes seconds")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where parts of a named model were fetched to")
    parser.add_argument(
        "--repair", action="store_true", help="fetch what is wrong again, and nothing else; for fetched parts"
    )
    parser.add_argument("--source", metavar="hub|URL|DIR", help="where --repair fetches from (default: the hub)")
    parser.add_argument("--again", action="store_true", help="read every file, also those that were right before")


def run(given: argparse.Namespace) -> int:
    if given.quick and given.again:
        raise UsageError("--quick reads no files and --again reads all; leave one of them out")
    stored = _stored(given)
    if stored is not None:
        from swarm.store.verify_stored import Wanted, verify_stored

        return verify_stored(Wanted(stored, given.manifest, given.quick, given.repair, given.source))
    if given.repair or given.source is not None:
        raise UsageError(
            f"--repair and --source are for fetched parts, and there are none of {given.what}; download it again, or "
            "name their folder with --data-dir DIR"
        )
    target = find_target(given.what, given.model, given.manifest)
    copy = check_copy(target.manifest, target.folder, kept=not given.again)
    name, n_files = copy.manifest.name, len(copy.paths)
    say(f"{name} in {target.folder}: sizes and headers of {_files(n_files)} are right")
    for line in copy.remarks:
        say(line)
    if target.others:
        say(f"not part of it, and not looked at: {', '.join(target.others)}")
    if given.quick:
        return 0
    digests = find_digests(copy.manifest, given.manifest)
    with reading(bytes_to_read(copy, again=given.again)) as shown:
        n_known = 0
        for result in verify_whole(copy, shown, again=given.again, digests=digests):
            n_known += result.known
            known = " (read by an earlier run)" if result.known else ""
            say(f"{result.index + 1}/{n_files} {result.path.name}: right{known}")
    say(_verdict(n_files, n_known, f"{name}, artifact {copy.manifest.artifact_id[:12]}"))
    return 0


def _stored(given: argparse.Namespace) -> Stored | None:
    """The folder that parts were fetched into, if that is what is meant."""
    path = user_path(given.what)
    if given.data_dir is not None or has_parts(path):
        return _of_the_model(given.model, find_stored(given.what, given.data_dir, given.manifest))
    if path.name and exists(path.with_name(path.name + SUFFIX)):  # one of the files of such a folder
        return _of_the_model(given.model, find_stored(str(path.parent), None, given.manifest))
    if given.model is not None:
        return None
    if given.manifest is not None:
        here = exists(path) or not has_parts(default_folder(given.manifest.stem))
        return None if here else find_stored(given.what, None, given.manifest)
    name = given.what.lower()
    if not _is_fetched(name, wanted=given.repair or given.source is not None):
        return None
    return find_stored(name) if has_parts(default_folder(name)) else None


def _is_fetched(name: str, *, wanted: bool) -> bool:
    """Whether a model's name means its parts. A small model's are ``wanted`` where they are to be repaired; else its
    name means the file that comes with the program."""
    pinned = PINNED.get(name)
    return (wanted and name in KNOWN) if pinned is None else pinned.configured_folder() is None


def _of_the_model(model: str | None, stored: Stored) -> Stored:
    if model is None:
        return stored
    wanted = named(model)
    if wanted is None:
        raise UsageError(f"--model {model}: no manifest is known by that name; choose one of: {', '.join(NAMES)}")
    if wanted.artifact_id != stored.manifest.artifact_id:
        raise ArtifactMismatch(
            f"{stored.folder}: parts of {stored.manifest.name}, not of {model}; leave --model out, or name the folder "
            f"of {model}"
        )
    return stored


def _verdict(n_files: int, n_known: int, model: str) -> str:
    if not n_known:
        return f"every byte of {_files(n_files)} is that of {model}"
    return (
        f"{_files(n_files)} as of {model}: {n_files - n_known} read whole now, {n_known} by an earlier run and "
        "unchanged since by size and times; read all once more with --again"
    )


def _files(n_files: int) -> str:
    return "1 file" if n_files == 1 else f"{n_files} files"

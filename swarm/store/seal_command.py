"""``swarm-artifact seal``: a digest list from files of which every byte is right."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from swarm.artifact.catalog import NAMES, find_model, open_model
from swarm.artifact.digest_list import MAX_LIST_BYTES, DigestList
from swarm.artifact.local_copy import LocalCopy, check_copy
from swarm.artifact.local_path import is_folder, printable, user_path
from swarm.artifact.progress import hashing, reading
from swarm.artifact.small_file import read_small, replace_file
from swarm.artifact.verify import find_target
from swarm.errors import ArtifactError, UsageError
from swarm.store.complete import TO_READ, check_complete
from swarm.store.lists import find_digests
from swarm.store.whole import bytes_to_read, verify_whole

NAME = "seal"
HELP = "write down the digest of every tensor, for those who fetch parts of a model"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="DIR|FILE|NAME", help="folder with all files of the model, or one of them")
    parser.add_argument("-o", "--out", type=Path, metavar="LIST", required=True, help="the list to write, as JSON")
    parser.add_argument(
        "--model", metavar="NAME", help=f"which of {', '.join(NAMES)} it should be (default: told by the files)"
    )
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="what it should be, from inspect --manifest-out")
    parser.add_argument("--again", action="store_true", help="read every file, also those that were read before")


def run(given: argparse.Namespace) -> int:
    _check_place(given.out)  # before minutes are spent on reading
    copy = _copy(given)
    tensors: dict[str, str] = {}
    digests = find_digests(copy.manifest, given.manifest)
    with reading(bytes_to_read(copy, again=given.again)) as shown:
        for result in verify_whole(copy, shown, again=given.again, digests=digests):
            tensors.update(result.tensors)
    try:
        replace_file(given.out, DigestList(copy.manifest.artifact_id, tensors).to_json())
    except OSError as error:
        raise _unwritable(given.out, error) from error
    name, artifact_id = copy.manifest.name, copy.manifest.artifact_id
    print(printable(f"{given.out}: {len(tensors)} tensors of {name}, artifact {artifact_id[:12]}"))
    return 0


def _copy(given: argparse.Namespace) -> LocalCopy:
    """With its manifest: a known one, the given one, or for a file that is nobody's one that is made now."""
    path = user_path(given.what)
    by_hand = given.model is None and given.manifest is None
    try:
        target = find_target(given.what, given.model, given.manifest)
    except UsageError:
        if not by_hand or not path.is_file():
            raise
    else:
        check_complete(target.folder, target.manifest, TO_READ)
        return check_copy(target.manifest, target.folder, kept=not given.again)
    with hashing(printable(path.name)) as progress:
        copy = open_model(find_model(str(path)), progress)
    check_complete(path.parent, copy.manifest, TO_READ)
    return copy


def _check_place(path: Path) -> None:
    """Replaces nothing but an earlier list: the model itself is easily named by mistake."""
    if is_folder(path) or not is_folder(path.parent):
        raise UsageError(f"--out {path}: can't be written there; name a file in a folder that exists")
    if os.path.lexists(path) and not _is_list(path):
        raise UsageError(f"--out {path}: is there and no digest list; choose another place")


def _is_list(path: Path) -> bool:
    try:
        data = read_small(path, MAX_LIST_BYTES)
        if data:  # an empty file loses nothing
            DigestList.from_json(data)
    except (OSError, ArtifactError):
        return False
    return True


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"--out {path}: can't be written ({error.strerror}); choose another place")

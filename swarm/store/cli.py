"""``swarm-artifact``: what a model is made of, and whether a copy of it is complete and undamaged."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from swarm import __version__
from swarm.artifact.catalog import GLM52, GLM_TINY, NAMES, PINNED, LocalModel, find_model, open_model
from swarm.artifact.local_copy import LocalCopy, check_copy
from swarm.artifact.local_path import printable
from swarm.artifact.manifest import MAX_DOCUMENT_BYTES, Manifest
from swarm.artifact.progress import hashing, reading
from swarm.artifact.small_file import read_small, replace_file
from swarm.artifact.verify import bytes_to_read, find_target, verify
from swarm.errors import ArtifactError, SwarmError, UsageError

PROG = "swarm-artifact"
INTERRUPTED = 130
BROKEN_PIPE = 141

DESCRIPTION = "Shows what a model is made of, and checks whether a copy of it is complete and undamaged."
EPILOG = f"""\
models by name: {", ".join(NAMES)}

examples:
  what {GLM52.name} is made of and where it may be cut; no files are needed:
    {PROG} inspect {GLM52.name}
  check downloaded files, first in seconds by their headers, then every byte:
    {PROG} verify --quick /models/GLM-5.2
    {PROG} verify /models/GLM-5.2
  check the model that comes with this program:
    {PROG} verify {GLM_TINY}
  write down what a model of your own is, and check a copy of it elsewhere:
    {PROG} inspect model.gguf --manifest-out model.json
    {PROG} verify /copy/model.gguf --manifest model.json

exit codes: 0 all right, 2 wrong option, 3 files missing, damaged or of another model, 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        given = _parser().parse_args(arguments)
        code = _inspect(given) if given.command == "inspect" else _verify(given)
        sys.stdout.flush()
        return code
    except SwarmError as error:
        print(f"{PROG}: {printable(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        what_next = "files read so far are remembered, the same command goes on with the next one"
        print(f"{PROG}: interrupted; {what_next}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has enough
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:  # models' own come as SwarmError
        _drop_output()
        what = f"{error.filename}: " if error.filename else "can't write the output: "
        print(f"{PROG}: {printable(what)}{error.strerror}; make room there, or choose another place", file=sys.stderr)
        return SwarmError.exit_code


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
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect|verify")
    _add_inspect(_command(commands, "inspect", "show layers, types, bytes, legal cuts and files of a model"))
    _add_verify(_command(commands, "verify", "check files against the manifest of the model they should be"))
    return parser


def _command(commands: argparse._SubParsersAction[_Parser], name: str, what: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME|PATH", help=f"{', '.join(NAMES)}, or a GGUF file")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--manifest-out", type=Path, metavar="FILE", help="write the manifest, for verify --manifest")


def _add_verify(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--again", action="store_true", help="read every file, also those that were right before")


def _inspect(given: argparse.Namespace) -> int:
    from swarm.artifact import show
    from swarm.artifact.description import document

    manifest = _manifest(given.model)
    pinned = next((pinned for pinned in PINNED.values() if pinned.artifact_id == manifest.artifact_id), None)
    if given.manifest_out is not None:
        _write(given.manifest_out, manifest.to_json())
    if given.json:
        print(json.dumps(document(manifest, pinned)))
    elif given.manifest_out is None:
        show.model(manifest, pinned)
    return 0


def _manifest(text: str) -> Manifest:
    """A pinned model's needs none of its files."""
    pinned = PINNED.get(text.lower())
    if pinned is not None:
        return pinned.manifest
    copy = _open(find_model(text))
    for remark in copy.remarks:
        print(printable(remark), file=sys.stderr)
    return copy.manifest


def _open(model: LocalModel) -> LocalCopy:
    with hashing(printable(model.path.name)) as progress:
        return open_model(model, progress)


def _write(path: Path, data: bytes) -> None:
    """Replaces nothing but an earlier manifest: the model itself is easily named by mistake."""
    try:
        if os.path.lexists(path) and not _is_manifest(path):
            raise UsageError(f"--manifest-out {path}: is there and no manifest; choose another place")
        replace_file(path, data)
    except OSError as error:
        raise UsageError(f"--manifest-out {path}: can't be written ({error.strerror}); choose another place") from error


def _is_manifest(path: Path) -> bool:
    try:
        data = read_small(path, MAX_DOCUMENT_BYTES)
        if data:  # an empty file loses nothing
            Manifest.from_json(data)
    except (OSError, ArtifactError):
        return False
    return True


def _verify(given: argparse.Namespace) -> int:
    if given.quick and given.again:
        raise UsageError("--quick reads no files and --again reads all; leave one of them out")
    target = find_target(given.what, given.model, given.manifest)
    copy = check_copy(target.manifest, target.folder, kept=not given.again)
    name, n_files = copy.manifest.name, len(copy.paths)
    _say(f"{name} in {target.folder}: sizes and headers of {_files(n_files)} are right")
    for line in copy.remarks:
        _say(line)
    if target.others:
        _say(f"not part of it, and not looked at: {', '.join(target.others)}")
    if given.quick:
        return 0
    with reading(bytes_to_read(copy, again=given.again)) as shown:
        n_known = 0
        for result in verify(copy, shown, again=given.again):
            n_known += result.known
            known = " (read by an earlier run)" if result.known else ""
            _say(f"{result.index + 1}/{n_files} {result.path.name}: right{known}")
    _say(_verdict(n_files, n_known, f"{name}, artifact {copy.manifest.artifact_id[:12]}"))
    return 0


def _verdict(n_files: int, n_known: int, model: str) -> str:
    if not n_known:
        return f"every byte of {_files(n_files)} is that of {model}"
    return (
        f"{_files(n_files)} as of {model}: {n_files - n_known} read whole now, {n_known} by an earlier run and "
        "unchanged since by size and times; read all once more with --again"
    )


def _say(line: str) -> None:
    print(printable(line), flush=True)


def _files(n_files: int) -> str:
    return "1 file" if n_files == 1 else f"{n_files} files"


if __name__ == "__main__":
    sys.exit(main())

"""``swarm-artifact verify`` of a folder that parts of a model were fetched into, and their repair."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarm.artifact.catalog import PINNED
from swarm.artifact.memory import format_bytes
from swarm.artifact.progress import reading
from swarm.errors import ArtifactMismatch, SourceError, StoreError, UsageError
from swarm.store.committer import OnTensor
from swarm.store.disagreements import some_tensors
from swarm.store.find import Stored
from swarm.store.held import FileFindings, check_held, headers_differ, held_pieces
from swarm.store.lists import find_digests, tensor_check
from swarm.store.partial_copy import PartialCopy
from swarm.store.pieces import Piece
from swarm.store.say import say
from swarm.store.source_text import HUB


@dataclass(frozen=True)
class Wanted:
    """``source`` None: the model's hub, if it has one."""

    stored: Stored
    manifest_path: Path | None
    quick: bool = False
    repair: bool = False
    source: str | None = None


def verify_stored(wanted: Wanted) -> int:
    """Prints what it finds. Raises ``ArtifactMismatch`` for what is wrong and not repaired."""
    stored = wanted.stored
    digests = find_digests(stored.manifest, wanted.manifest_path)
    source = _source(wanted) if wanted.repair else ""
    open_copy = PartialCopy.open_existing if wanted.repair else PartialCopy.look
    with open_copy(stored.folder, stored.manifest) as copy:
        for remark in copy.remarks:
            say(remark)
        _check_headers(copy, _command(stored), repair=wanted.repair)
        if wanted.quick:
            if copy.missing(copy.table.headers()):
                raise StoreError(f"{stored.folder}: not all headers are here yet; go on with: swarm-artifact fetch")
            say(f"{stored.manifest.name} in {stored.folder}: sizes and headers are right")
            return 0
        found = _look(copy, digests)
        wrong = [each for each in found if not each.is_right]
        if wrong and not wanted.repair:
            raise ArtifactMismatch(_what_is_wrong(wrong, stored))
        if wrong or copy.missing(_wanted_headers(copy)):
            _repair(copy, wrong, source, digests)
    say(_verdict(found, stored, sealed=digests is not None))
    return 0


def _source(wanted: Wanted) -> str:
    if wanted.source is not None:
        return wanted.source
    if not _has_hub(wanted.stored):
        raise UsageError("--repair: say where the right bytes come from, with --source URL or --source DIR")
    return HUB


def _check_headers(copy: PartialCopy, command: str, *, repair: bool) -> None:
    difference = headers_differ(copy)
    if not difference:
        return
    if not repair:
        raise ArtifactMismatch(f"{difference}; fetch the headers again with: {command}")
    say(difference)
    copy.forget(copy.table.headers())


def _wanted_headers(copy: PartialCopy) -> Sequence[Piece]:
    """Of a copy of which something is here."""
    files = range(copy.table.n_files)
    return copy.table.headers() if any(held_pieces(copy, file) for file in files) else ()


def _look(copy: PartialCopy, digests: Mapping[str, str] | None) -> list[FileFindings]:
    n_files = copy.table.n_files
    total = sum(piece.bytes for file in range(n_files) for piece in held_pieces(copy, file))
    found = []
    with reading(total) as shown:
        for each in check_held(copy, digests, shown):
            found.append(each)
            held = format_bytes(sum(piece.bytes for piece in each.held))
            say(f"{each.file + 1}/{n_files} {copy.path(each.file).name}: {held} are here, {_state(each)}")
    return found


def _state(found: FileFindings) -> str:
    if found.is_right:
        return "right"
    if found.foreign:
        return "all of it, and its SHA-256 is not the model's"
    parts = []
    if found.changed:
        where = some_tensors({piece.tensor for piece in found.changed if piece.tensor}) if found.tensors else ""
        header = "" if all(piece.tensor for piece in found.changed) else "the header"
        what = " and ".join(part for part in (header, where) if part)
        count = len(found.changed)
        parts.append(f"damaged on the disk in {what} ({count} piece{'' if count == 1 else 's'})")
    if found.wrong:
        parts.append(f"never right by the digest list in {some_tensors(found.wrong)}")
    return " and ".join(parts)


def _what_is_wrong(wrong: Sequence[FileFindings], stored: Stored) -> str:
    n_bytes = sum(piece.bytes for each in wrong for piece in each.to_fetch)
    first = f"{stored.manifest.files[wrong[0].file].name}: {_state(wrong[0])}"
    more = f" (and {len(wrong) - 1} more of its files)" if len(wrong) > 1 else ""
    return f"{stored.folder / first}{more}; fetch {format_bytes(n_bytes)} again, alone, with: {_command(stored)}"


def _command(stored: Stored) -> str:
    source = "" if _has_hub(stored) else " --source SOURCE"
    return f"swarm-artifact verify {shlex.quote(str(stored.folder))} --repair{source}"


def _has_hub(stored: Stored) -> bool:
    return any(each.artifact_id == stored.manifest.artifact_id for each in PINNED.values())


def _repair(copy: PartialCopy, wrong: Sequence[FileFindings], source: str, digests: Mapping[str, str] | None) -> None:
    """Pieces count as they are until their new bytes come, so that a repair that fails can be begun again."""
    pieces = [piece for each in wrong for piece in each.to_fetch]
    before = {piece: copy.digest(piece) for each in wrong for piece in each.changed if not each.foreign}
    check = tensor_check(copy, digests) or partial(_as_before, copy, before, source)
    try:
        asyncio.run(_fetch(copy, pieces, source, check))
    except BaseException:
        if lost := {piece.tensor for piece in copy.missing(pieces) if piece.tensor}:
            say(f"missing now, until it is fetched again by swarm-artifact fetch or by a node: {some_tensors(lost)}")
        raise
    copy.local_copy()
    for each in wrong:
        if copy.whole(each.file):
            copy.check_whole(each.file)
    say(f"{len(pieces)} piece{'' if len(pieces) == 1 else 's'} fetched again from {source}")


def _as_before(copy: PartialCopy, before: Mapping[Piece, bytes | None], source: str, tensor: str) -> bool:
    """Without a list what came first is all there is to compare with."""
    other = [piece for piece, digest in before.items() if piece.tensor == tensor and copy.digest(piece) != digest]
    if other:
        copy.forget(other)
        raise SourceError(
            f"{source}: gives other bytes of {some_tensors([tensor])} than were here at first; choose another --source"
        )
    return True


async def _fetch(copy: PartialCopy, again: Sequence[Piece], source: str, check: OnTensor) -> None:
    from swarm.store.fetch import fetch
    from swarm.store.sources import opened_source

    async with opened_source(source, copy.manifest) as opened:
        pieces = [*dict.fromkeys([*_wanted_headers(copy), *again])]
        await fetch(copy, opened, pieces, again=again, on_tensor=check)


def _verdict(found: Sequence[FileFindings], stored: Stored, *, sealed: bool) -> str:
    held = format_bytes(sum(piece.bytes for each in found for piece in each.held))
    name, total = stored.manifest.name, format_bytes(stored.manifest.size_bytes)
    by = "are the model's, by its digest list" if sealed else "are as they came (nobody has sealed this model)"
    return f"{name} in {stored.folder}: the {held} of {total} that are here {by}"

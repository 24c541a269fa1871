"""``swarm-artifact compare``: whether the nodes of a swarm hold the same bytes of a model."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.artifact.catalog import NAMES, named
from swarm.artifact.local_path import printable
from swarm.artifact.verify import read_manifest
from swarm.errors import ArtifactMismatch, NoPeersGiven, PeerFailed, SwarmError, UsageError
from swarm.store.disagreements import Digests, Disagreement, disagreements, some_tensors
from swarm.store.lists import find_digests

if TYPE_CHECKING:
    from dht.record import SpanRecord
    from swarm.artifact.manifest import Manifest
    from swarm.store.peer_digests import Told

NAME = "compare"
HELP = "ask the nodes of a swarm for the digests of their tensors, and say who differs from whom"


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "exit codes: 0 all that is held twice is the same, 1 nothing could be compared, 2 wrong option, "
        "3 nodes disagree, 6 network, 7 no node serves the model, 8 some did not give what they announce"
    )
    parser.add_argument("model", metavar="NAME", help=f"{', '.join(NAMES)}, or what the swarm calls a model of its own")
    parser.add_argument("--initial-peers", nargs="+", metavar="ADDRESS", help="nodes of the swarm (or SWARM_PEERS)")
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="what it is, from inspect --manifest-out")


def run(given: argparse.Namespace) -> int:
    from dht.addresses import parse_peers
    from dht.errors import BadAddress

    try:
        peers = parse_peers(" ".join(given.initial_peers or [os.environ.get("SWARM_PEERS", "")]))
    except BadAddress as error:
        raise UsageError(str(error)) from error
    if not peers:
        raise NoPeersGiven("no peers given; name a node of the swarm with --initial-peers ADDRESS or SWARM_PEERS")
    return asyncio.run(compare(given.model, given.manifest, peers))


async def compare(model: str, path: Path | None, peers: Sequence[str]) -> int:
    """Prints what it finds and returns the exit code. Raises ``SwarmError``."""
    from swarm.store.onlooker import Onlooker  # hivemind takes seconds to load
    from swarm.store.peer_digests import DigestReader

    manifest = _known(model) if path is None else read_manifest(path)
    async with Onlooker.joined(peers) as swarm:
        if manifest is None:
            manifest = await swarm.manifest(model)
        right = find_digests(manifest, path)
        records = await swarm.records(manifest)
        told = await DigestReader(swarm.peer, manifest).read(records)
    found = disagreements(told.held, right)
    for line in _report(manifest, {record.peer_id: record for record in records}, told, found):
        print(printable(line), flush=True)
    comparable = right is not None or _held_twice(told.held)
    print(printable(_verdict(found, told, comparable=comparable, sealed=right is not None)), flush=True)
    return _exit_code(found, told, comparable=comparable)


def _known(model: str) -> Manifest | None:
    known = named(model)
    return None if known is None else known.manifest


def _report(
    manifest: Manifest, records: Mapping[str, SpanRecord], told: Told, found: Sequence[Disagreement]
) -> Iterator[str]:
    yield f"{manifest.name}, artifact {manifest.artifact_id[:12]}: {_count(len(records), 'node')}"
    for peer, record in records.items():
        tensors = told.held.get(peer)
        state = f"{len(tensors)} tensors, root {record.digest_root[:12]}" if tensors is not None else "no digests"
        yield f"  {_who(record)}: {told.failed.get(peer) or state}"
    for each in found:
        yield f"disagreement on {some_tensors(each.tensors)}"
        for number, side in enumerate(each.sides, 1):
            wrong = ", not the model's by its digest list" if each.wrong.intersection(side) else ""
            yield f"  side {number}{wrong}: {', '.join(_who(records[peer]) for peer in side)}"


def _who(record: SpanRecord) -> str:
    name = f" ({record.public_name})" if record.public_name else ""
    return f"{record.peer_id}{name} {record.first}:{record.last}"


def _held_twice(held: Mapping[str, Digests]) -> bool:
    seen: set[str] = set()
    for tensors in held.values():
        if not seen.isdisjoint(tensors):
            return True
        seen.update(tensors)
    return False


def _verdict(found: Sequence[Disagreement], told: Told, *, comparable: bool, sealed: bool) -> str:
    if found:
        tensors = _count(sum(len(each.tensors) for each in found), "tensor")
        who = "" if sealed else "; who is right can only be told by a digest list, from: swarm-artifact seal"
        return f"the bytes of {tensors} differ; their nodes' operators should run: swarm-artifact verify{who}"
    if not comparable or not told.held:
        return "nothing could be compared: no tensor's digest is known from two nodes, or from one and a list"
    compared = "are the model's, by its digest list" if sealed else "agree wherever two nodes hold the same tensor"
    return f"the bytes of {_count(len(told.held), 'node')} {compared}"


def _exit_code(found: Sequence[Disagreement], told: Told, *, comparable: bool) -> int:
    if found:
        return ArtifactMismatch.exit_code
    if told.failed:
        return PeerFailed.exit_code
    return 0 if comparable and told.held else SwarmError.exit_code


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

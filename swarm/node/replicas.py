"""A node and those that hold the same tensors: where their bytes differ, the operator hears of it.

Nobody is refused for it: without a digest list it can't be told who is right, and a stranger may announce anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from dht.record import SpanRecord
from swarm.node.network import Network
from swarm.node.own_digests import SpanDigests
from swarm.node.reporter import Reporter
from swarm.node.shared import Shared
from swarm.protocol import clean_text
from swarm.store.disagreements import disagreements, some_tensors
from swarm.store.peer_digests import DigestReader, Told

logger = logging.getLogger(__name__)

MAX_LOOKS = 3  # for the list of a node that gives none
MAX_LINES = 5  # at a time: strangers can announce as many records as they like
_WHAT_NEXT = "swarm-artifact verify checks this node's files, swarm-artifact compare shows everybody's"


class Stage(Protocol):
    """The node, as far as this concerns it."""

    @property
    def shared(self) -> Shared: ...


class Replicas:
    """``run`` it as a task while the node serves. Nodes are asked for what they announce until they have answered: one
    that has just come may be busy."""

    def __init__(
        self, stage: Stage, network: Network, reporter: Reporter, right: Mapping[str, str] | None, look_seconds: float
    ) -> None:
        self._stage = stage
        self._network = network
        self._reporter = reporter
        self._right = right
        self._look_seconds = look_seconds
        self._looks: dict[tuple[str, str, str], int] = {}  # by own root, peer and its root

    async def run(self) -> None:
        """Looks at once, and again when others have come."""
        records = await self._network.records()
        while True:
            await self.compare(records)
            await asyncio.sleep(self._look_seconds)
            records = self._network.view.snapshot.records  # kept fresh by others

    async def compare(self, records: Sequence[SpanRecord]) -> None:
        """Tells the operator of those nodes that differ and have not answered yet. Raises nothing for what peers do."""
        own = self._stage.shared.span_digests
        if own is None:
            return
        present = {(own.root, record.peer_id, record.digest_root) for record in records}
        self._looks = {key: looks for key, looks in self._looks.items() if key in present}  # who is gone is forgotten
        others = {record.peer_id: record for record in records if self._is_new(record, own)}
        if not others:
            return
        told = await DigestReader(self._network.peer, self._network.manifest).read(others.values())
        for peer, record in others.items():
            key = own.root, peer, record.digest_root
            self._looks[key] = self._looks.get(key, 0) + 1 if peer in told.failed else MAX_LOOKS
        lines = remarks(own.tensors, others, told, self._right)
        for line in lines[:MAX_LINES]:
            self._reporter.line(line)
        if len(lines) > MAX_LINES:
            self._reporter.line(f"and {len(lines) - MAX_LINES} more nodes have other bytes than this one")
        for peer, failure in told.failed.items():
            logger.info("can't compare tensors with %s: %s", peer, failure)

    def _is_new(self, record: SpanRecord, own: SpanDigests) -> bool:
        first, last = self._stage.shared.span
        overlaps = record.first < last and first < record.last
        differs = record.digest_root not in ("", own.root)
        looks = self._looks.get((own.root, record.peer_id, record.digest_root), 0)
        return overlaps and differs and looks < MAX_LOOKS and record.peer_id != self._network.peer_id


def remarks(
    own: Mapping[str, str], others: Mapping[str, SpanRecord], told: Told, right: Mapping[str, str] | None
) -> Sequence[str]:
    """One line for each node with other bytes; ``right`` are those of the model where they are known."""
    lines = []
    for peer, tensors in told.held.items():
        shared_tensors = {name: digest for name, digest in tensors.items() if name in own}
        found = disagreements({"own": own, "other": shared_tensors}, right)
        differing = {name for each in found for name in each.tensors if len(each.sides) > 1}
        if differing:
            wrong = {who for each in found for who in each.wrong if differing.intersection(each.tensors)}
            record = others[peer]
            public_name = clean_text(record.public_name)
            name = f" ({public_name})" if public_name else ""
            lines.append(
                f"warning: {peer}{name}, layers {record.first}:{record.last}, has other bytes than this node in "
                f"{some_tensors(differing)}; {_whose(wrong, sealed=right is not None)}; {_WHAT_NEXT}"
            )
    return lines


def _whose(wrong: set[str], *, sealed: bool) -> str:
    if not sealed:
        return "one of the two was given wrong ones, and it can't be told which"
    if wrong == {"other"}:
        return "this node's are the model's, by its digest list"
    return "by the digest list this node's are wrong" if "own" in wrong else "which are right is not known"

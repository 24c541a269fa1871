"""Which layers a node comes to: bounded by memory and disk, beside others that come at the same moment."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.range_server import RangeServer
from dht.record import NodeState, SpanRecord
from shim.types import ContextSpec
from swarm.artifact.catalog import GLM52, GLM_TINY, KNOWN
from swarm.errors import NotEnoughMemory, StoreError
from swarm.node import stored_parts
from swarm.node.arrival import Arrival, believed
from swarm.node.completeness import Completeness
from swarm.node.config import ModelOptions, StoreOptions
from swarm.node.node import SwarmNode
from swarm.node.parts import WholeFiles
from swarm.node.plan import Plan, Planner
from swarm.node.reporter import Silent
from swarm.node.stored_parts import StoredParts
from swarm.placement.choice import Choice
from swarm.placement.moving import MoveRules
from swarm.store.partial_copy import PartialCopy
from tests.node.harness import config
from tests.routing.records import CUTS, record

TINY = KNOWN[GLM_TINY].manifest
GIB = 1 << 30
SLACK = 1 << 18  # ends of blocks


class Disk:
    """A GiB is missing of each layer that is not held."""

    def __init__(self, room_bytes: int, *held: int) -> None:
        self._room_bytes = room_bytes
        self._held = frozenset(held)

    def missing_bytes(self, first: int, last: int, *, mtp: bool = False) -> int:
        return GIB * len(set(range(first, last)) - self._held)

    def room_bytes(self) -> int:
        return self._room_bytes


def planner(disk: Disk, memory_bytes: int = 1 << 40) -> Planner:
    options = ModelOptions(Path(), memory_bytes=memory_bytes, contexts=(ContextSpec(1, 512),))
    return Planner(GLM52.manifest, options, 1 << 40, disk)


def test_the_disk_bounds_what_is_chosen() -> None:
    assert planner(Disk(200 * GIB)).choose((), "me").span == (0, 78)
    assert planner(Disk(20 * GIB)).choose((), "me").span == (0, 18)


def test_what_is_held_takes_no_room() -> None:
    assert planner(Disk(20 * GIB, *range(30))).choose((), "me").span == (0, 50)


def test_the_error_names_what_is_too_small() -> None:
    with pytest.raises(
        StoreError, match=r"hold layers 0:78, but even layers 0:1 need 512\.0 MiB more than the 512\.0 M"
    ):
        planner(Disk(GIB // 2)).choose((), "me")
    with pytest.raises(StoreError, match=r"need 1\.0 GiB more than the 0 B that may be taken; free some, lower"):
        planner(Disk(-GIB)).choose((), "me")
    with pytest.raises(NotEnoughMemory, match="the smallest span, layers 1:2, needs"):
        planner(Disk(-GIB), memory_bytes=1).choose((), "me")


async def test_nothing_is_held_where_there_is_no_folder(tmp_path: Path) -> None:
    store = StoreOptions(TINY, tmp_path / "none" / "yet", "http://127.0.0.1:9/files")
    options = ModelOptions(Path(), "0:2", contexts=(ContextSpec(1, 512),), store=store)
    parts = await StoredParts.look(options)
    plan = Planner(TINY, replace(options, memory_bytes=GIB), GIB, parts).explicit()
    assert plan is not None
    assert parts.held_spans() == ()
    missing = parts.missing_bytes(0, 2)
    assert TINY.span_bytes(0, 2) + TINY.files[0].header_bytes <= missing < TINY.size_bytes
    assert parts.intent(plan).startswith(f"will fetch {missing / (1 << 20):.1f} MiB of 12.9 MiB (0 B are here already)")
    parts.check_room(plan)
    assert not (tmp_path / "none").exists()


def joining(peer_id: str, first: int, last: int) -> SpanRecord:
    return record(peer_id, first, last, state=NodeState.JOINING)


def test_whoever_was_seen_before_the_choice_is_believed() -> None:
    seen = frozenset([("a", 0, 5)])
    records = [joining("a", 0, 5), joining("b", 0, 5), record("c", 5, 10)]
    assert [each.state for each in believed(records, seen)] == [NodeState.ONLINE, NodeState.JOINING, NodeState.ONLINE]
    assert [each.state for each in believed([joining("a", 5, 10)], seen)] == [NodeState.JOINING]


def test_completeness_is_told_when_it_changes() -> None:
    model = replace(TINY, name="tiny")
    n_layers = model.n_layers
    assert CUTS[-1] != n_layers

    def served(*spans: tuple[int, int], state: NodeState = NodeState.ONLINE) -> list[SpanRecord]:
        return [
            record(str(span), *span, state=state).model_copy(
                update={"artifact_id": model.artifact_id, "n_layers": n_layers}
            )
            for span in spans
        ]

    completeness = Completeness(model)
    assert completeness.look(served((0, 2))) == ""
    assert completeness.look(served((0, 2))) == ""
    assert completeness.look(served((0, 2), (6, 8))) == ("the swarm is still incomplete: nobody serves layers 2:6")
    assert completeness.look(served((0, 2), (2, 6), (6, 8))) == "the swarm is complete: every layer of tiny is served"
    assert completeness.look(served((0, 2), (2, 6), (2, 6), (6, 8))) == ""
    assert completeness.look([*served((0, 2), (6, 8)), *served((2, 6), state=NodeState.DRAINING)]) == (
        "the swarm is incomplete: nobody serves layers 2:6 any more; start a node for them"
    )


async def test_a_swarm_of_another_model_is_told_from_the_own_one(
    llama_untied_path: Path, glm_tiny: Path, tmp_path: Path
) -> None:
    told: dict[str, list[str]] = {}

    class Told(Silent):
        def __init__(self, name: str) -> None:
            self._lines = told.setdefault(name, [])

        def line(self, text: str) -> None:
            self._lines.append(text)

    async with (
        SwarmNode(config(llama_untied_path, "0:2", tmp_path), Told("first")) as first,
        SwarmNode(config(glm_tiny, "0:2", tmp_path, first.addresses), Told("other")) as other,
        SwarmNode(config(llama_untied_path, "2:4", tmp_path, first.addresses), Told("same")),
    ):
        theirs, ours = first.manifest.name, other.manifest.name
    hint = f"this swarm serves {theirs}, and nobody in it {ours} yet"
    assert any(line.startswith(hint) for line in told["other"])
    assert not any("nobody in it" in line for line in told["first"] + told["same"])


async def test_parts_are_not_served_as_the_whole(tmp_path: Path) -> None:
    source = KNOWN[GLM_TINY].fetch()
    with PartialCopy.open(tmp_path / "parts", TINY) as copy:
        for piece in copy.table.of_span(0, 2):
            copy.write(piece, source.read_bytes()[piece.start : piece.stop])
        copy.commit()
    with pytest.raises(StoreError, match="only parts of it were fetched; to serve those name"):
        await WholeFiles.open(ModelOptions(tmp_path / "parts" / TINY.files[0].name), Silent())


async def test_nothing_of_parts_that_are_complete_is_freed_while_they_are_served(tmp_path: Path) -> None:
    """As the whole model, by one node or more; a hole would be zeros in what they have mapped."""
    source, folder = KNOWN[GLM_TINY].fetch(), tmp_path / "parts"
    with PartialCopy.open(folder, TINY) as copy:
        for piece in copy.table.of_file(0):
            copy.write(piece, source.read_bytes()[piece.start : piece.stop])
        copy.commit()
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            await WholeFiles.open(ModelOptions(folder / TINY.files[0].name), Silent())
    nodes = [await WholeFiles.open(ModelOptions(folder / TINY.files[0].name), Silent()) for _ in range(2)]
    for node in nodes:
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}; end that one first"):
            PartialCopy.open_existing(folder, TINY)
        await node.close()
    PartialCopy.open_existing(folder, TINY).close()


@dataclass
class Others:
    """The network as an arriving node sees it, and what it says there."""

    announced: list[tuple[int, int]] = field(default_factory=list)
    manifest = TINY
    peer_id = "me"
    addresses = ()
    is_alone = False

    @property
    def view(self) -> SimpleNamespace:
        return SimpleNamespace(snapshot=SimpleNamespace(records=()))

    @property
    def announcer(self) -> Others:
        return self

    async def publish(self, said: SpanRecord) -> None:
        assert said.state is NodeState.JOINING
        self.announced.append((said.first, said.last))

    async def records(self) -> tuple[SpanRecord, ...]:
        return ()


@dataclass
class Script:
    """Rules that say what is written here, one after the other, and then nothing any more."""

    choices: list[Choice | None]
    rules = MoveRules(second_look_seconds=0.0)

    def recheck_seconds(self, _random: float) -> float:
        return 0.01

    def look_again(self, _records: object, _span: object, _held: object) -> Choice | None:
        return self.choices.pop(0) if self.choices else None


@dataclass
class Slow:
    """Parts of which the first span that is fetched never arrives, unless it is the ``last`` one."""

    last: tuple[int, int]
    cancelled: list[tuple[int, int]] = field(default_factory=list)

    def missing_bytes(self, _first: int, _last: int, *, mtp: bool = False) -> int:
        return 1

    def held_spans(self) -> tuple[tuple[int, int], ...]:
        return ()

    async def get(self, plan: Plan, _reporter: object) -> None:
        try:
            if plan.span != self.last:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(plan.span)
            raise


def choice(first: int, last: int) -> Choice:
    return Choice(first, last, 0, 0, 0, "")


@pytest.mark.parametrize(
    ("choices", "announced", "cancelled"),
    [
        ([choice(2, 6)], [(0, 2), (2, 6)], []),  # gives way before it fetches
        ([None, choice(2, 6)], [(0, 2), (2, 6)], [(0, 2)]),  # the swarm changes while it fetches
        ([choice(6, 8), None, None, choice(2, 6)], [(0, 2), (6, 8), (2, 6)], [(6, 8)]),
    ],
)
async def test_a_joiner_chooses_again(
    choices: list[Choice | None], announced: list[tuple[int, int]], cancelled: list[tuple[int, int]]
) -> None:
    others, parts = Others(), Slow(last=(2, 6))
    shown: list[Plan] = []
    options = ModelOptions(Path(), memory_bytes=GIB, contexts=(ContextSpec(1, 512),))
    planner = Planner(TINY, options, GIB)
    arrival = Arrival(others, planner, parts, Silent(), "", shown.append)  # type: ignore[arg-type]
    plan = planner.carried_out(choice(0, 2), (ContextSpec(1, 512),))
    reached = await asyncio.wait_for(arrival.reach(plan, Script(choices)), 20)  # type: ignore[arg-type]
    assert reached.span == (2, 6)
    assert others.announced == announced
    assert parts.cancelled == cancelled
    assert [each.span for each in shown] == announced[1:]


async def test_a_better_choice_that_cannot_be_had_changes_nothing() -> None:
    """The disk may be fuller than it was when the sums were made."""
    others, parts = Others(), Slow(last=(0, 2))
    lines: list[str] = []
    said = SimpleNamespace(line=lines.append)

    def full(_plan: Plan) -> None:
        raise StoreError("the disk is full")

    options = ModelOptions(Path(), memory_bytes=GIB, contexts=(ContextSpec(1, 512),))
    planner = Planner(TINY, options, GIB)
    arrival = Arrival(others, planner, parts, said, "", full)  # type: ignore[arg-type]
    plan = planner.carried_out(choice(0, 2), (ContextSpec(1, 512),))
    reached = await asyncio.wait_for(arrival.reach(plan, Script([choice(2, 6)])), 20)  # type: ignore[arg-type]
    assert reached.span == (0, 2)
    assert others.announced == [(0, 2)]
    assert lines[-1] == "layers 0:2 are kept to, the others are out of reach: the disk is full"


async def test_what_arrives_takes_no_room_from_what_is_still_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is just large enough is so while it fills."""
    with RangeServer(KNOWN[GLM_TINY].fetch().parent) as server:
        await _fetch_into_what_is_just_enough(server.url, tmp_path, monkeypatch)


async def _fetch_into_what_is_just_enough(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreOptions(TINY, tmp_path / "parts", source, disk_reserve_bytes=0)
    options = ModelOptions(Path(), "0:2", memory_bytes=GIB, contexts=(ContextSpec(1, 512),), store=store)
    parts = await StoredParts.open(options, Silent())
    need = parts.missing_bytes(0, 2)
    files = [tmp_path / "parts" / file.name for file in TINY.files]

    def free(_folder: Path) -> int:
        return need + SLACK - sum(file.stat().st_blocks * 512 for file in files if file.exists())

    monkeypatch.setattr(stored_parts, "free_bytes", free)
    rooms: list[int] = []

    class Looking(Silent):
        def progress(self, what: str, fraction: float, *, n_bytes: int = 0) -> None:
            rooms.append(parts.room_bytes())

    plan = Planner(TINY, options, GIB, parts).explicit()
    assert plan is not None
    await parts.get(plan, Looking())
    assert len(rooms) > 2 and min(rooms) >= need
    assert parts.missing_bytes(0, 2) == 0 and parts.room_bytes() <= SLACK
    await parts.close()

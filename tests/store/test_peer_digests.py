"""What peers say of their tensors, and what hostile ones say: bounded, checked, and never believed beyond its root."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.errors import PeerUnreachable
from dht.identity import Identity
from dht.record import SpanRecord
from swarm.artifact.catalog import GLM_TINY, KNOWN
from swarm.artifact.digest_list import DigestList
from swarm.node.own_digests import SpanDigests
from swarm.node.replicas import MAX_LOOKS, Replicas, remarks
from swarm.protocol import FrameStream, WireError, artifact_parts, pb
from swarm.store.cli import main
from swarm.store.digests import span_root
from swarm.store.disagreements import Disagreement, disagreements, some_tensors
from swarm.store.peer_digests import MAX_LISTS, MAX_TRIES, NOT_ASKED, DigestReader, Told
from tests.protocol.sockets import RawEnd, raw_pair
from tests.routing.records import record

MANIFEST = KNOWN[GLM_TINY].manifest
RIGHT = KNOWN[GLM_TINY].digests or {}
PEER = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"
Answer = Callable[[FrameStream, pb.ArtifactRequest], Awaitable[None]]


def span(first: int, last: int, *, mtp: bool = False) -> dict[str, str]:
    return {tensor.name: RIGHT[tensor.name] for tensor in MANIFEST.span_tensors(first, last, mtp=mtp)}


def listed(tensors: Mapping[str, str]) -> bytes:
    return DigestList(MANIFEST.artifact_id, tensors).to_json()


def serving(data: bytes) -> Answer:
    async def answer(stream: FrameStream, request: pb.ArtifactRequest) -> None:
        assert request.piece == pb.DIGESTS
        for part in artifact_parts(data, request.offset):
            await stream.send(part)

    return answer


async def silent(_stream: FrameStream, _request: pb.ArtifactRequest) -> None:
    await asyncio.Event().wait()


@dataclass
class Peers:
    """Real sockets to peers that answer as they are told; others can't be reached."""

    answers: dict[str, Answer]
    asked: list[str] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def open_stream(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> RawEnd:
        self.asked.append(peer_id)
        if peer_id not in self.answers:
            raise PeerUnreachable(peer_id, "nobody there")
        ours, theirs = await raw_pair()
        self._tasks.add(asyncio.create_task(self._serve(peer_id, FrameStream(*theirs))))
        return ours

    async def _serve(self, peer_id: str, stream: FrameStream) -> None:
        try:
            request = await stream.receive()
            assert isinstance(request, pb.ArtifactRequest)
            await self.answers[peer_id](stream, request)
        finally:
            await stream.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def read(answers: Mapping[str, Answer], *records: SpanRecord, seconds: float = 30.0) -> tuple[Told, Peers]:
    peers = Peers(dict(answers))
    try:
        return await DigestReader(peers, MANIFEST, seconds).read(records), peers
    finally:
        await peers.close()


def announced(peer: str, first: int, last: int, root: str = "", **changes: object) -> SpanRecord:
    return record(peer, first, last, artifact_id=MANIFEST.artifact_id, n_layers=8, digest_root=root, **changes)


async def test_lists_that_come_to_their_root_are_believed_and_asked_for_once() -> None:
    low, high = span(0, 2), span(2, 8, mtp=True)
    told, peers = await read(
        {"one": serving(listed(low)), "two": serving(listed(low)), "three": serving(listed(high))},
        announced("one", 0, 2, span_root(low)),
        announced("two", 0, 2, span_root(low)),
        announced("three", 2, 8, span_root(high), has_mtp=True),
        announced("four", 0, 8),
    )
    assert told == Told(held={"one": low, "two": low, "three": high}, silent=["four"])
    assert sorted(peers.asked) == ["one", "three"]


WRONG_ROOT = "served other digests than its record promises"
ONE_OFF = {**span(0, 2), "blk.0.attn_norm.weight": "0" * 64}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (listed(ONE_OFF), WRONG_ROOT),
        (listed(dict(sorted(span(0, 2).items())[1:])), "(the digest list lacks tensor"),
        (listed(span(2, 6)), "bytes are offered, at most"),
        (listed({**dict(sorted(span(0, 2).items())[1:]), "x": "0" * 64}), "(the digest list "),
        (
            listed(span(0, 2)).replace(MANIFEST.artifact_id.encode(), b"0" * 64),
            "(a digest list of artifact 0000",
        ),
        (listed(span(0, 2)) + b" ", "bytes are offered, at most"),
        (listed(span(0, 2))[:-1], "makes no sense"),
        (b"[" * 500, "makes no sense"),
        (b"", "makes no sense"),
    ],
)
async def test_lists_that_are_none_are_named(data: bytes, text: str) -> None:
    told, _ = await read({"liar": serving(data)}, announced("liar", 0, 2, span_root(span(0, 2))))
    assert not told.held
    assert text in told.failed["liar"]
    assert told.failed["liar"].startswith("peer liar ")


async def test_peers_that_misbehave_cost_little() -> None:
    good = listed(span(0, 2))

    async def refuses(stream: FrameStream, _request: pb.ArtifactRequest) -> None:
        await stream.refuse(WireError(pb.NOT_READY, "not digested"))

    async def out_of_order(stream: FrameStream, _request: pb.ArtifactRequest) -> None:
        await stream.send(pb.Pong(nonce=1))

    async def garbage(stream: FrameStream, _request: pb.ArtifactRequest) -> None:
        stream._writer.write(b"\x00\x00\x00\x04abcd")
        await asyncio.sleep(0.1)

    async def endless(stream: FrameStream, _request: pb.ArtifactRequest) -> None:
        """Says nothing against the rules, and never ends."""
        for at in range(len(good)):
            await stream.send(pb.ArtifactPart(offset=at, total_bytes=len(good), data=good[at : at + 1]))
            await asyncio.sleep(0.05)

    async def twice(stream: FrameStream, _request: pb.ArtifactRequest) -> None:
        for _ in range(2):
            await stream.send(pb.ArtifactPart(offset=0, total_bytes=len(good), data=good[:100]))

    async def gone(stream: FrameStream, _request: pb.ArtifactRequest) -> None:
        await stream.send(pb.ArtifactPart(offset=0, total_bytes=len(good), data=good[:100]))

    answers = {
        "refuses": refuses,
        "out_of_order": out_of_order,
        "garbage": garbage,
        "endless": endless,
        "silent": silent,
        "twice": twice,
        "gone": gone,
    }
    roots = {name: f"{number:064x}" for number, name in enumerate((*answers, "unreachable"))}
    told, _ = await read(answers, *(announced(name, 0, 2, root) for name, root in roots.items()), seconds=0.5)
    assert told.failed.keys() == roots.keys()
    texts = {
        "refuses": "not digested",
        "out_of_order": "Pong is out of order",
        "endless": "did not answer within 0.5 s",
        "silent": "did not answer within 0.5 s",
        "twice": "does not follow the last",
        "unreachable": "nobody there",
    }
    for name, text in texts.items():
        assert text in told.failed[name]


async def test_who_announces_the_root_of_others_can_not_silence_them() -> None:
    low = span(0, 2)
    root = span_root(low)
    told, _ = await read({"good": serving(listed(low))}, announced("gone", 0, 2, root), announced("good", 0, 2, root))
    assert told.held == {"gone": low, "good": low}  # what is gone has announced the same


async def test_no_number_of_records_makes_for_more_than_so_many_questions() -> None:
    alike = [announced(f"same{number}", 0, 2, "f" * 64) for number in range(50)]
    different = [announced(f"other{number}", 0, 2, f"{number:064x}") for number in range(MAX_LISTS + 20)]
    told, peers = await read({}, *alike, *different)
    assert len(peers.asked) == MAX_TRIES + MAX_LISTS - 1
    assert len(told.failed) == len(alike) + len(different)
    assert list(told.failed.values()).count(NOT_ASKED) == len(told.failed) - len(peers.asked)


async def test_layers_that_the_model_has_not_are_not_asked_about() -> None:
    told, peers = await read({}, announced("a", 5, 9, "f" * 64), announced("b", 5, 5, "f" * 64))
    assert told.failed == dict.fromkeys("ab", "its layers are not the model's")
    assert not peers.asked


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2000), st.booleans())
def test_whatever_a_peer_serves_is_its_list_or_a_failure(noise: bytes, at: int, has_noise_only: bool) -> None:
    low = span(0, 1)
    good = listed(low)
    data = noise if has_noise_only else good[:at] + noise + good[at + len(noise) :]
    told, _ = asyncio.run(read({"peer": serving(data)}, announced("peer", 0, 1, span_root(low))))
    assert told == Told(held={"peer": low}) if data == good else told.failed.keys() == {"peer"}


# --- who disagrees with whom


def test_sides_are_told_tensor_by_tensor() -> None:
    held = {
        "a": {"x": "1", "y": "1", "z": "1"},
        "b": {"x": "1", "y": "2", "z": "2", "only b": "7"},
        "c": {"x": "1", "y": "2", "z": "2"},
        "d": {"z": "3"},
    }
    y = Disagreement(("y",), (("b", "c"), ("a",)))
    z = Disagreement(("z",), (("b", "c"), ("a",), ("d",)))
    assert disagreements(held) == (y, z)
    assert disagreements(held, {"y": "1", "z": "2"}) == (
        Disagreement(y.tensors, y.sides, frozenset("bc")),
        Disagreement(z.tensors, z.sides, frozenset("ad")),
    )
    assert disagreements({"a": held["a"]}) == ()
    assert disagreements({"a": held["a"]}, {"x": "1", "y": "1", "z": "9"}) == (
        Disagreement(("z",), (("a",),), frozenset("a")),
    )
    assert some_tensors("x") == "tensor x"
    assert some_tensors("edcba") == "tensors a, b, c and 2 more"


digests = st.dictionaries(st.sampled_from("uvwxyz"), st.sampled_from("123"), max_size=6)


@given(st.dictionaries(st.sampled_from("abcde"), digests, max_size=5))
def test_every_pair_that_differs_is_on_different_sides(held: dict[str, dict[str, str]]) -> None:
    found = disagreements(held)
    for tensor in "uvwxyz":
        holders = {peer: tensors[tensor] for peer, tensors in held.items() if tensor in tensors}
        named = [each for each in found if tensor in each.tensors]
        assert len(named) == (len(set(holders.values())) > 1)
        for each in named:
            assert {peer for side in each.sides for peer in side} == holders.keys()
            assert {frozenset(side) for side in each.sides} == {
                frozenset(peer for peer in holders if holders[peer] == digest) for digest in set(holders.values())
            }


def test_what_a_node_tells_its_operator() -> None:
    own = {"x": "1", "y": "1"}
    others = {name: announced(name, 0, 2, "f" * 64, public_name="\x1b[2JAnn\n" * (name == "b")) for name in "abc"}
    told = Told(held={"a": {"x": "1", "z": "9"}, "b": {"x": "2", "y": "2"}, "c": {"y": "3"}})
    unknown = remarks(own, others, told, None)
    assert [line.partition(";")[0] for line in unknown] == [
        "warning: b ([2JAnn), layers 0:2, has other bytes than this node in tensors x, y",
        "warning: c, layers 0:2, has other bytes than this node in tensor y",
    ]
    assert all("it can't be told which" in line for line in unknown)
    known = remarks(own, others, told, {"x": "1", "y": "1", "z": "9"})
    assert all("this node's are the model's, by its digest list" in line for line in known)
    (line,) = remarks(own, others, Told(held={"c": {"y": "3"}}), {"y": "3"})
    assert "by the digest list this node's are wrong" in line


async def test_a_node_asks_again_whom_it_could_not_ask() -> None:
    """And not for ever."""
    own, peers = dict.fromkeys(span(0, 2), "1" * 64), Peers({})
    lines: list[str] = []
    stage = SimpleNamespace(shared=SimpleNamespace(span=(0, 2), span_digests=SpanDigests(own, span_root(own), b"")))
    network = SimpleNamespace(peer=peers, manifest=MANIFEST, peer_id="me")
    replicas = Replicas(stage, network, SimpleNamespace(line=lines.append), None, 1.0)  # type: ignore[arg-type]
    other = announced("one", 0, 2, span_root(span(0, 2)))
    try:
        await replicas.compare([other])  # it can't be reached yet
        assert (peers.asked, lines) == (["one"], [])
        peers.answers["one"] = serving(listed(span(0, 2)))
        for _ in range(3):
            await replicas.compare([other])
        assert len(lines) == 1
        assert "one, layers 0:2, has other bytes than this node" in lines[0]
        assert peers.asked == ["one"] * 2
        never = announced("two", 0, 2, "f" * 64)
        for _ in range(2 * MAX_LOOKS):
            await replicas.compare([other, never])
        assert peers.asked[2:] == ["two"] * MAX_LOOKS
    finally:
        await peers.close()


# --- swarm-artifact compare, before it has met anybody


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 6, "no peers given; name a node of the swarm with --initial-peers ADDRESS or SWARM_PEERS"),
        (("--initial-peers", "nonsense"), 2, "nonsense"),
        (("--manifest", "none.json", "--initial-peers", PEER), 2, "--manifest none.json: can't be read"),
        (("--initial-peers", PEER), 6, "no initial peer answered"),
    ],
)
def test_compare_without_a_swarm(
    arguments: tuple[str, ...],
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SWARM_PEERS", raising=False)
    assert main(["compare", GLM_TINY, *arguments]) == code
    said = capsys.readouterr().err
    assert text in said
    assert said.startswith("swarm-artifact: ")
    assert said.count("\n") == 1

"""From records to an open session: sizes, refusals, and waiting with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from dht.record import NodeState, SlotClass, SpanRecord
from swarm.artifact.manifest import Manifest, load_manifest
from swarm.client.blame import Avoided
from swarm.client.config import ClientConfig, Timeouts
from swarm.client.opening import Need, SessionOpener, plan
from swarm.errors import ContextExceeded, NodeFull, NoRoute, PeerFailed
from swarm.ids import PeerId
from swarm.protocol import pb
from swarm.routing import JoinHint, RouteRequest
from tests.client.scripted import ScriptedHop, ScriptedNetwork, until

LAYERS = 6


@pytest.fixture(scope="module")
def manifest(llama_untied_path: Path) -> Manifest:
    return load_manifest(llama_untied_path)


@pytest.fixture
def request_(manifest: Manifest) -> RouteRequest:
    hint = JoinHint("PATH", ("/ip4/192.0.2.1/tcp/1/p2p/x",))
    return RouteRequest(legal_cuts=manifest.cuts, artifact_id=manifest.artifact_id, context_tokens=1, hint=hint)


def record(
    manifest: Manifest, peer: str, first: int, last: int, *slots: tuple[int, int, int], chunk_tokens: int = 64
) -> SpanRecord:
    """``slots``: (tokens, total, free)."""
    return SpanRecord(
        peer_id=peer,
        artifact_id=manifest.artifact_id,
        n_layers=manifest.n_layers,
        first=first,
        last=last,
        state=NodeState.ONLINE,
        protocol_version=1,
        numerics_id="n",
        slots=tuple(SlotClass(tokens=tokens, total=total, free=free) for tokens, total, free in slots),
        chunk_tokens=chunk_tokens,
    )


def halves(manifest: Manifest, *slots: tuple[int, int, int]) -> list[SpanRecord]:
    slots = slots or ((1024, 2, 2),)
    return [record(manifest, "peer0", 0, 3, *slots), record(manifest, "peer1", 3, LAYERS, *slots, chunk_tokens=32)]


def test_a_bounded_answer_takes_what_it_needs(manifest: Manifest, request_: RouteRequest) -> None:
    planned = plan(halves(manifest), request_, Need(100, 20), 4096)
    assert planned.context_tokens == 120
    assert planned.chain.chunk_tokens == 32
    assert [(place.peer_id, place.layers) for place in planned.places()] == [("peer0", (0, 3)), ("peer1", (3, LAYERS))]


def test_an_unbounded_answer_takes_the_largest_free_size(manifest: Manifest, request_: RouteRequest) -> None:
    records = halves(manifest, (1024, 2, 2), (8192, 1, 0))
    assert plan(records, request_, Need(100), 1 << 20).context_tokens == 1024
    assert plan(halves(manifest, (1024, 2, 2), (8192, 1, 1)), request_, Need(100), 1 << 20).context_tokens == 8192


def test_no_session_is_longer_than_the_model_was_trained_for(manifest: Manifest, request_: RouteRequest) -> None:
    assert plan(halves(manifest, (8192, 1, 1)), request_, Need(100), 4096).context_tokens == 4096


@pytest.mark.parametrize(
    ("need", "text"), [(Need(2000), "2000 tokens exceeds .* 1024"), (Need(1000, 100), "100 tokens of")]
)
def test_a_prompt_beyond_every_chain_is_refused_with_the_numbers(
    manifest: Manifest, request_: RouteRequest, need: Need, text: str
) -> None:
    with pytest.raises(ContextExceeded, match=rf"{text}.*; shorten the prompt"):
        plan(halves(manifest), request_, need, 1 << 20)


def test_full_slots_are_not_too_small_slots(manifest: Manifest, request_: RouteRequest) -> None:
    with pytest.raises(NoRoute):
        plan(halves(manifest, (1024, 2, 0)), request_, Need(100, 20), 1 << 20)


def test_missing_layers_are_named_with_the_command(manifest: Manifest, request_: RouteRequest) -> None:
    with pytest.raises(NoRoute, match=r"swarm-node --model PATH --layers 3:6 --initial-peers /ip4/192") as caught:
        plan(halves(manifest)[:1], request_, Need(10, 10), 1 << 20)
    assert caught.value.missing == ((3, 6),)


class Opening:
    """A session opener over scripted hops; ``records`` may change while it waits."""

    def __init__(self, manifest: Manifest, request: RouteRequest, seconds: float = 0.6) -> None:
        self.records: Sequence[SpanRecord] = halves(manifest)
        self.network = ScriptedNetwork([ScriptedHop(), ScriptedHop(), ScriptedHop()])
        self.said: list[str] = []
        self.avoided = Avoided()
        self.looks = 0
        config = ClientConfig(timeouts=Timeouts(route_seconds=seconds, open_seconds=2))
        self.opener = SessionOpener(self.network, self._look, manifest, request, config, self.avoided, self.said.append)

    async def _look(self) -> Sequence[SpanRecord]:
        self.looks += 1
        return self.records


async def test_a_peer_that_refuses_is_routed_around(manifest: Manifest, request_: RouteRequest) -> None:
    opening = Opening(manifest, request_)
    opening.records = [*halves(manifest), record(manifest, "peer2", 3, LAYERS, (1024, 1, 1))]
    opening.network.hops[1].refuse = pb.Error(code=pb.NODE_DRAINING)
    opening.network.hops[2].refuse = None
    async with await opening.opener.open(Need(10, 10)) as session:
        assert [place.peer_id for place in session.places] == ["peer0", "peer2"]
    await opening.network.close()


async def test_a_full_node_is_asked_again_until_a_slot_is_free(manifest: Manifest, request_: RouteRequest) -> None:
    opening = Opening(manifest, request_, seconds=30)
    opening.network.hops[1].refuse = pb.Error(code=pb.NODE_FULL, retry_after_seconds=1)
    waiting = asyncio.create_task(opening.opener.open(Need(10, 10)))
    await until(lambda: opening.said)
    opening.network.hops[1].refuse = None
    async with await waiting:
        assert "waiting up to 30 s more: peer peer1 (layers 3:6) has no free slot" in opening.said[0]
    await opening.network.close()


async def test_in_the_end_the_last_refusal_is_the_error(manifest: Manifest, request_: RouteRequest) -> None:
    opening = Opening(manifest, request_, seconds=1.6)
    opening.network.hops[1].refuse = pb.Error(code=pb.NODE_FULL, retry_after_seconds=1)
    with pytest.raises(NodeFull, match=r"peer1 \(layers 3:6\) has no free slot"):
        await opening.opener.open(Need(10, 10))
    assert len(opening.said) == 1, "not at every look"
    assert len(opening.network.hops[1].opened) > 1
    await opening.network.idle()
    await opening.network.close()


async def test_a_hole_left_by_a_dead_peer_is_named_with_what_fills_it(
    manifest: Manifest, request_: RouteRequest
) -> None:
    opening = Opening(manifest, request_, seconds=0)
    opening.network.unreachable.add(PeerId("peer1"))
    with pytest.raises(
        PeerFailed, match=r"peer1 \(layers 3:6\) can't be reached.*; .*start one: .*--layers 3:6"
    ) as caught:
        await opening.opener.open(Need(10, 10))
    assert caught.value.peer == "peer1"
    assert "another peer may serve" not in str(caught.value)
    await opening.network.close()


async def test_records_that_appear_while_it_waits_are_used(manifest: Manifest, request_: RouteRequest) -> None:
    opening = Opening(manifest, request_, seconds=30)
    opening.records = halves(manifest)[:1]
    waiting = asyncio.create_task(opening.opener.open(Need(10, 10)))
    await until(lambda: opening.said)
    assert "layers 3:6" in opening.said[0]
    opening.records = halves(manifest)
    async with await waiting as session:
        assert len(session.places) == 2
    await opening.network.close()


async def test_without_records_it_says_what_is_missing(manifest: Manifest, request_: RouteRequest) -> None:
    opening = Opening(manifest, request_, seconds=0)
    opening.records = []
    with pytest.raises(NoRoute, match="--layers 0:6"):
        await opening.opener.open(Need(10, 10))


async def test_a_peer_that_failed_lately_is_the_last_choice(manifest: Manifest, request_: RouteRequest) -> None:
    opening = Opening(manifest, request_)
    opening.avoided.add(PeerId("peer1"))
    opening.records = [*halves(manifest), record(manifest, "peer2", 3, LAYERS, (1024, 1, 1), chunk_tokens=1)]
    async with await opening.opener.open(Need(10, 10)) as session:
        assert session.places[1].peer_id == "peer2"
    opening.records = halves(manifest)
    async with await opening.opener.open(Need(10, 10)) as session:
        assert session.places[1].peer_id == "peer1"
    assert opening.avoided.now() == {"peer1"}, "it is forgiven when it has served a step"
    await opening.network.close()


@pytest.mark.parametrize("code", [code for code in pb.ErrorCode.values() if code])
async def test_no_answer_of_one_peer_keeps_the_others_from_serving(
    manifest: Manifest, request_: RouteRequest, code: pb.ErrorCode.ValueType
) -> None:
    opening = Opening(manifest, request_)
    opening.records = [*halves(manifest), record(manifest, "peer2", 3, LAYERS, (1024, 1, 1), chunk_tokens=1)]
    opening.network.hops[1].refuse = pb.Error(code=code, message="so says a liar")
    async with await opening.opener.open(Need(10, 10)) as session:
        assert [place.peer_id for place in session.places] == ["peer0", "peer2"]
    await opening.network.close()


async def test_what_no_other_peer_can_mend_is_raised_at_once(manifest: Manifest, request_: RouteRequest) -> None:
    opening = Opening(manifest, request_, seconds=30)
    opening.network.hops[0].refuse = pb.Error(code=pb.CONTEXT_FULL, message="64 at most")
    with pytest.raises(ContextExceeded, match="64 at most"):
        await opening.opener.open(Need(10, 10))
    await opening.network.close()

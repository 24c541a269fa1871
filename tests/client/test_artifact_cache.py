"""Manifest and header from peers that may lie, stop, or be gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from swarm.artifact.gguf_file import read_file
from swarm.artifact.header import header_bytes
from swarm.artifact.manifest import Manifest, load_manifest
from swarm.client.artifact_cache import ArtifactCache, PieceRequest, Source
from swarm.errors import PeerFailed
from swarm.ids import ArtifactId, PeerId
from swarm.protocol import pb
from tests.client.scripted import until


@dataclass
class Peers:
    """Serves pieces in small parts; ``spoiled`` peers change bytes, ``dying`` ones stop after so many bytes."""

    manifest: bytes
    header: bytes
    spoiled: dict[str, tuple[pb.ArtifactPiece.ValueType, bytes]] = field(default_factory=dict)
    dying: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, int]] = field(default_factory=list)

    async def parts(self, source: Source, request: PieceRequest, offset: int) -> AsyncIterator[tuple[int, bytes]]:
        self.asked.append((source.peer_id, pb.ArtifactPiece.Name(request.piece), offset))
        data = self.manifest if request.piece == pb.MANIFEST else self.header
        piece, wrong = self.spoiled.get(source.peer_id, (None, b""))
        if piece == request.piece:
            data = wrong
        left = self.dying.get(source.peer_id, 2 * len(data) + 1000)
        for at in range(offset, len(data), 1000):
            if (left := left - 1000) < 0:
                raise PeerFailed(f"peer {source.peer_id} closed the connection", source.peer_id)
            yield len(data), data[at : at + 1000]
            await asyncio.sleep(0)


GOOD = Source(PeerId("good"))
BAD = Source(PeerId("bad"))


@pytest.fixture
def manifest(llama_untied_path: Path) -> Manifest:
    return load_manifest(llama_untied_path)


@pytest.fixture
def peers(llama_untied_path: Path, manifest: Manifest) -> Peers:
    return Peers(manifest.to_json(), header_bytes(llama_untied_path))


async def test_what_is_fetched_once_needs_no_peer_again(tmp_path: Path, manifest: Manifest, peers: Peers) -> None:
    cache = ArtifactCache(tmp_path)
    assert cache.load(manifest.artifact_id) is None
    fetched = await cache.fetch(manifest.artifact_id, [GOOD], peers)
    assert fetched.manifest.artifact_id == manifest.artifact_id
    vocabulary = read_file(fetched.vocabulary_path).header
    assert not vocabulary.tensors
    assert vocabulary.metadata.text("tokenizer.ggml.model") == "gpt2"
    assert await ArtifactCache(tmp_path).fetch(manifest.artifact_id, [], peers) == fetched
    assert len(peers.asked) == 2


async def test_a_liar_is_named_and_the_next_peer_is_asked(
    tmp_path: Path, manifest: Manifest, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    peers.spoiled["bad"] = (pb.HEADER, peers.header[:-1] + bytes([peers.header[-1] ^ 1]))
    fetched = await ArtifactCache(tmp_path).fetch(manifest.artifact_id, [BAD, GOOD], peers)
    assert fetched.manifest.artifact_id == manifest.artifact_id
    assert "peer bad sent wrong bytes" in caplog.text
    assert peers.asked[-1] == ("good", "HEADER", 0)


@pytest.mark.parametrize("piece", [pb.MANIFEST, pb.HEADER])
async def test_wrong_bytes_from_everybody_end_in_an_error_that_names_them(
    tmp_path: Path, manifest: Manifest, peers: Peers, piece: pb.ArtifactPiece.ValueType
) -> None:
    peers.spoiled["bad"] = (piece, b"{}" * 50)
    cache = ArtifactCache(tmp_path)
    with pytest.raises(PeerFailed, match=r"peer bad sent wrong bytes.*; try again"):
        await cache.fetch(manifest.artifact_id, [BAD], peers)
    assert cache.load(manifest.artifact_id) is None
    assert (await cache.fetch(manifest.artifact_id, [GOOD], peers)).manifest.artifact_id == manifest.artifact_id


async def test_an_endless_header_is_cut_short(tmp_path: Path, manifest: Manifest, peers: Peers) -> None:
    peers.spoiled["bad"] = (pb.HEADER, b"\0" * (len(peers.header) + 1))
    with pytest.raises(PeerFailed, match=f"announced {len(peers.header) + 1} bytes"):
        await ArtifactCache(tmp_path).fetch(manifest.artifact_id, [BAD], peers)


async def test_a_fetch_resumes_where_the_last_peer_died(tmp_path: Path, manifest: Manifest, peers: Peers) -> None:
    peers.dying["bad"] = 1000
    await ArtifactCache(tmp_path).fetch(manifest.artifact_id, [BAD, GOOD], peers)
    assert peers.asked == [("bad", "MANIFEST", 0), ("good", "MANIFEST", 1000), ("good", "HEADER", 0)]


async def test_bytes_resumed_after_a_liar_are_fetched_again_before_anybody_is_blamed(
    tmp_path: Path, manifest: Manifest, peers: Peers
) -> None:
    peers.dying["bad"] = 1000
    peers.spoiled["bad"] = (pb.MANIFEST, b"x" * len(peers.manifest))
    await ArtifactCache(tmp_path).fetch(manifest.artifact_id, [BAD, GOOD], peers)
    assert peers.asked[1:3] == [("good", "MANIFEST", 1000), ("good", "MANIFEST", 0)]


async def test_a_damaged_copy_is_fetched_again(tmp_path: Path, manifest: Manifest, peers: Peers) -> None:
    cache = ArtifactCache(tmp_path)
    await cache.fetch(manifest.artifact_id, [GOOD], peers)
    (cache.folder(manifest.artifact_id) / "header.bin").write_bytes(peers.header[:-1])
    assert cache.load(manifest.artifact_id) is None
    assert (await cache.fetch(manifest.artifact_id, [GOOD], peers)).manifest.artifact_id == manifest.artifact_id


async def test_clients_that_fetch_together_fetch_once(tmp_path: Path, manifest: Manifest, peers: Peers) -> None:
    caches = [ArtifactCache(tmp_path) for _ in range(4)]
    fetched = await asyncio.gather(*(cache.fetch(manifest.artifact_id, [GOOD], peers) for cache in caches))
    assert len(peers.asked) == 2
    assert all(one == fetched[0] for one in fetched)


async def test_a_cancelled_fetch_leaves_no_half_artifact(tmp_path: Path, manifest: Manifest, peers: Peers) -> None:
    cache = ArtifactCache(tmp_path)
    fetching = asyncio.create_task(cache.fetch(manifest.artifact_id, [GOOD], peers))
    await until(lambda: peers.asked)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert cache.load(manifest.artifact_id) is None
    assert (await cache.fetch(manifest.artifact_id, [GOOD], peers)).manifest.artifact_id == manifest.artifact_id


async def test_no_peer_at_all(tmp_path: Path, peers: Peers) -> None:
    with pytest.raises(PeerFailed, match="no peer offers it"):
        await ArtifactCache(tmp_path).fetch(ArtifactId("0" * 64), [], peers)

"""Nodes that fetched their layers, and what they tell each other of the bytes: real nodes, real sockets."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from dht.peer import Peer
from dht.record import NodeState
from swarm.artifact.digest_list import SUFFIX, DigestList
from swarm.artifact.local_copy import check_copy
from swarm.artifact.manifest import Manifest, load_manifest
from swarm.errors import PeerFailed, SourceError
from swarm.ids import PeerId
from swarm.node.config import StoreOptions
from swarm.node.node import SwarmNode
from swarm.node.replicas import Replicas
from swarm.protocol import pb
from swarm.protocol.questions import Questions
from swarm.store.compare_command import compare
from swarm.store.digests import span_root
from swarm.store.peer_digests import DigestReader
from swarm.store.whole import verify_whole
from tests import models
from tests.node.harness import client_peer, config, until

SPOILT = "blk.2.ffn_up.weight"


class Heard:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, what: str, fraction: float, n_bytes: int = 0) -> None: ...

    def joined(self, addresses: Sequence[str]) -> None: ...


class Deaf:
    def file(self, label: str) -> None: ...

    def bytes(self, n_bytes: int) -> None: ...


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama as ``right/mine.gguf``, and with one byte of a tensor changed as ``wrong/mine.gguf``."""
    folder = tmp_path_factory.mktemp("trust")
    for name in ("right", "wrong"):
        (folder / name).mkdir()
    path = models.write_llama(folder / "right" / "mine.gguf")
    (folder / "mine.json").write_bytes(load_manifest(path).to_json())
    shutil.copy(path, folder / "wrong")
    entry = next(tensor for tensor in load_manifest(path).tensors if tensor.name == SPOILT)
    with (folder / "wrong" / "mine.gguf").open("r+b") as stream:
        stream.seek(entry.offset + 2)
        stream.write(b"\x3f")
    return folder


@pytest.fixture(scope="module")
def manifest(origin: Path) -> Manifest:
    return load_manifest(origin / "right" / "mine.gguf")


@pytest.fixture(scope="module")
def right(origin: Path, manifest: Manifest) -> Mapping[str, str]:
    (result,) = verify_whole(check_copy(manifest, origin / "right"), Deaf())
    return result.tensors


@asynccontextmanager
async def node(
    origin: Path,
    manifest: Manifest,
    source: str,
    layers: str,
    peers: Sequence[str] = (),
    digests: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[SwarmNode, Heard]]:
    """Fetches its layers from ``source`` into a folder of its own."""
    place = origin / secrets.token_hex(4)
    usual = config(place / "parts" / "mine.gguf", layers, origin, peers)
    store = StoreOptions(manifest, place / "parts", str(origin / source), disk_reserve_bytes=0, digests=digests)
    heard = Heard()
    async with SwarmNode(replace(usual, model=replace(usual.model, store=store)), heard) as serving:
        yield serving, heard


Pair = tuple[SwarmNode, SwarmNode, Heard]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pair(origin: Path, manifest: Manifest) -> AsyncIterator[Pair]:
    """An honest node, and one that was given wrong bytes of one tensor and serves overlapping layers."""
    async with (
        node(origin, manifest, "right", "0:4") as (honest, _),
        node(origin, manifest, "wrong", "2:6", honest.addresses) as (other, heard),
    ):
        yield honest, other, heard


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(pair: Pair) -> AsyncIterator[Peer]:
    async with client_peer(pair[0], pair[1]) as peer:
        yield peer


# --- what a node tells of its tensors


@pytest.mark.asyncio(loop_scope="module")
async def test_the_record_has_the_root_of_what_is_served(
    pair: Pair, client: Peer, manifest: Manifest, right: Mapping[str, str]
) -> None:
    honest, other, _ = pair
    records = {record.peer_id: record for record in await honest.records()}
    names = [tensor.name for tensor in manifest.span_tensors(0, 4)]
    assert records[honest.peer_id].digest_root == span_root({name: right[name] for name in names})
    told = await DigestReader(client, manifest).read(records.values())
    assert not told.failed
    assert not told.silent
    assert told.held[honest.peer_id] == {name: right[name] for name in names}
    held = told.held[other.peer_id]
    assert held.keys() == {tensor.name for tensor in manifest.span_tensors(2, 6)}
    assert [name for name in held if held[name] != right[name]] == [SPOILT]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_disagreement_is_shown_with_peers_and_tensors(
    pair: Pair, origin: Path, manifest: Manifest, right: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    honest, other, heard = pair
    await until(lambda: any(line.startswith("warning: ") for line in heard.lines))
    (line,) = [line for line in heard.lines if line.startswith("warning: ")]
    assert line == (
        f"warning: {honest.peer_id}, layers 0:4, has other bytes than this node in tensor {SPOILT}; one of the two was "
        "given wrong ones, and it can't be told which; swarm-artifact verify checks this node's files, swarm-artifact "
        "compare shows everybody's"
    )
    assert other.state is NodeState.ONLINE
    assert await compare("mine", origin / "mine.json", honest.addresses) == 3
    out = capsys.readouterr().out
    assert f"disagreement on tensor {SPOILT}\n" in out
    assert f": {honest.peer_id} 0:4\n" in out
    assert f": {other.peer_id} 2:6\n" in out
    assert "not the model's" not in out
    assert "the bytes of 1 tensor differ" in out
    # without a file of the manifest, from the nodes, by the name they give it
    assert await compare(manifest.name, None, honest.addresses) == 3
    assert capsys.readouterr().out.splitlines()[1:] == out.splitlines()[1:]
    listed = origin / f"mine{SUFFIX}"
    listed.write_bytes(DigestList(manifest.artifact_id, right).to_json())
    try:
        assert await compare("mine", origin / "mine.json", honest.addresses) == 3
    finally:
        listed.unlink()
    out = capsys.readouterr().out
    assert f", not the model's by its digest list: {other.peer_id} 2:6\n" in out
    assert out.count("not the model's") == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_replica_is_asked_once_for_what_it_announces(pair: Pair) -> None:
    _, other, _ = pair
    records, heard = await other.records(), Heard()
    replicas = Replicas(other, other._on_network, heard, None, look_seconds=60.0)
    await replicas.compare(records)
    assert len(heard.lines) == 1
    await replicas.compare(records)
    assert len(heard.lines) == 1
    await replicas.compare(())  # who has gone and comes back is asked again
    await replicas.compare(records)
    assert len(heard.lines) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_replicas_with_the_same_bytes_agree(
    origin: Path, manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        node(origin, manifest, "right", "0:3") as (alone, _),
        node(origin, manifest, "right", "3:6", alone.addresses) as (_, heard),
    ):
        assert await compare("mine", origin / "mine.json", alone.addresses) == 1
        assert "nothing could be compared" in capsys.readouterr().out
        async with node(origin, manifest, "right", "1:5", alone.addresses) as (_, more):
            assert await compare("mine", origin / "mine.json", alone.addresses) == 0
            assert "the bytes of 3 nodes agree wherever two nodes hold the same tensor" in capsys.readouterr().out
            assert not any(line.startswith("warning") for line in (*heard.lines, *more.lines))


async def test_with_a_list_a_malicious_source_is_caught_before_anything_is_served(
    origin: Path, manifest: Manifest, right: Mapping[str, str]
) -> None:
    with pytest.raises(SourceError, match=rf"tensor {SPOILT} has wrong bytes, also when fetched again; choose another"):
        async with node(origin, manifest, "wrong", "2:6", digests=right):
            pass


@pytest.mark.asyncio(loop_scope="module")
async def test_whole_files_are_announced_once_they_were_verified(
    origin: Path, manifest: Manifest, right: Mapping[str, str], tmp_path: Path
) -> None:
    shutil.copy(origin / "right" / "mine.gguf", tmp_path)
    given = config(tmp_path / "mine.gguf", "0:2", tmp_path)
    async with SwarmNode(given) as unread:
        assert [record.digest_root for record in await unread.records()] == [""]
        async with client_peer(unread) as peer:
            asked = Questions(peer, PeerId(unread.peer_id))
            with pytest.raises(PeerFailed, match="not every tensor that this node serves has been digested"):
                await asked.piece(manifest.artifact_id, pb.DIGESTS, 1 << 20, 20)
            told = await DigestReader(peer, manifest).read(await unread.records())
        assert told.silent == [unread.peer_id]
    list(verify_whole(check_copy(load_manifest(tmp_path / "mine.gguf"), tmp_path), Deaf()))
    async with SwarmNode(config(tmp_path / "mine.gguf", "0:2", tmp_path)) as read:
        names = [tensor.name for tensor in manifest.span_tensors(0, 2)]
        root = span_root({name: right[name] for name in names})
        assert [record.digest_root for record in await read.records()] == [root]

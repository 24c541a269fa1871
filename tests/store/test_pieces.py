"""How files are cut into pieces."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import pytest

from swarm.artifact.catalog import GLM52, KNOWN
from swarm.artifact.manifest import Manifest
from swarm.errors import ArtifactError
from swarm.store.pieces import PIECE_BYTES, Piece, PieceTable, piece_digest, tensor_digest

MANIFESTS = pytest.mark.parametrize("manifest", [GLM52.manifest, *(known.manifest for known in KNOWN.values())])


@MANIFESTS
def test_pieces_tile_every_file(manifest: Manifest) -> None:
    table = PieceTable(manifest)
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    seen: dict[str, int] = {}
    for number, file in enumerate(manifest.files):
        pieces = table.of_file(number)
        assert (pieces[0].start, pieces[-1].stop) == (0, file.size_bytes)
        assert all(before.stop == after.start for before, after in pairwise(pieces))
        assert [piece.index for piece in pieces] == list(range(table.n_pieces(number)))
        assert all(0 < piece.bytes - piece.padding <= PIECE_BYTES for piece in pieces)
        assert {piece.file for piece in pieces} == {number}
        for piece in pieces:
            if piece.tensor and piece.tensor not in seen:
                assert piece.start == tensors[piece.tensor].offset
            seen[piece.tensor] = seen.get(piece.tensor, 0) + piece.bytes - piece.padding
    assert seen.pop("") == sum(file.header_bytes for file in manifest.files)
    assert seen == {name: tensor.bytes for name, tensor in tensors.items()}


@MANIFESTS
def test_a_span_has_all_headers_and_its_tensors(manifest: Manifest) -> None:
    table = PieceTable(manifest)
    span = table.of_span(1, 2, mtp=True)
    headers = table.headers()
    assert span[: len(headers)] == headers
    assert sum(piece.bytes for piece in headers) == sum(file.header_bytes for file in manifest.files)
    rest = span[len(headers) :]
    assert list(rest) == sorted(rest, key=lambda piece: (piece.file, piece.start))
    assert sum(piece.bytes - piece.padding for piece in rest) == manifest.span_bytes(1, 2, mtp=True)
    every = {piece for file in range(table.n_files) for piece in table.of_file(file)}
    assert set(span) <= every
    assert {piece for name in (tensor.name for tensor in manifest.tensors) for piece in table.of_tensor(name)} | set(
        headers
    ) == every


def test_the_large_manifest_costs_little() -> None:
    """GLM-5.2 has 52,000 pieces; those that nobody asks for are not made."""
    manifest = GLM52.manifest
    tracemalloc.start()
    start = time.process_time()
    table = PieceTable(manifest)
    seconds, (kept, _) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2 << 20
    assert seconds < 0.5
    assert sum(table.n_pieces(file) for file in range(table.n_files)) > 50_000


def test_what_a_file_has_behind_its_last_tensor_is_cut_as_well() -> None:
    manifest = KNOWN["glm-tiny"].manifest
    behind = manifest.files[0].size_bytes
    longer = replace(manifest, files=(replace(manifest.files[0], size_bytes=behind + 2 * PIECE_BYTES + 5),))
    pieces = PieceTable(longer).of_file(0)
    last = max(tensor.offset + tensor.bytes for tensor in manifest.tensors)
    tail = [piece for piece in pieces if piece.start >= last]
    assert [(piece.tensor, piece.padding) for piece in tail] == [("", 0)] * 3
    assert tail[-1].stop == longer.files[0].size_bytes
    assert PieceTable(longer).headers() == PieceTable(manifest).headers()


def test_digests_leave_the_padding_out() -> None:
    piece = Piece(0, 0, 10, 20, "a", 3)
    assert piece_digest(piece, b"0123456...") == piece_digest(piece, b"0123456\0\0\0") == sha256(b"0123456").digest()
    assert tensor_digest([b"a" * 32, b"b" * 32]) == sha256(b"a" * 32 + b"b" * 32).hexdigest()


def test_a_manifest_of_absurd_size_is_refused() -> None:
    manifest = KNOWN["glm-tiny"].manifest
    with pytest.raises(ArtifactError, match="no model's"):
        PieceTable(replace(manifest, files=(replace(manifest.files[0], size_bytes=1 << 60),)))


def test_glm_is_cut_alike_on_every_machine() -> None:
    """Digests are compared between machines: another cut would need another format of the lists."""
    text = "".join(
        f"{piece.file} {piece.index} {piece.start} {piece.stop} {piece.tensor} {piece.padding}\n"
        for piece in PieceTable(GLM52.manifest).of_span(10, 14)
    )
    assert sha256(text.encode()).hexdigest() == "8a520c027bbc5d2dab734db4ea5f29d347dd184e3d517de57b9f0af48b168d7c"

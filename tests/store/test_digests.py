"""Digests of tensors and spans: what they are made of, where they are kept, and lists that strangers wrote."""

from __future__ import annotations

import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.artifact import embedded, pinned_model
from swarm.artifact.catalog import GLM52, GLM_TINY, KNOWN, digests_of
from swarm.artifact.digest import known_digest
from swarm.artifact.digest_list import SUFFIX, DigestList, list_bytes
from swarm.artifact.known_file import KnownFile
from swarm.artifact.local_copy import check_copy
from swarm.artifact.manifest import load_manifest
from swarm.errors import ArtifactError, ArtifactMismatch, UsageError
from swarm.ids import ArtifactId
from swarm.store import whole
from swarm.store.digests import FileDigester, span_root
from swarm.store.lists import find_digests
from swarm.store.pieces import PIECE_BYTES, Piece
from swarm.store.whole import bytes_to_read, kept_digests, verify_whole
from tests import models

OURS = ArtifactId("ab" * 32)
hex_digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
names = st.text("abcxyz019_.-", min_size=1, max_size=63)
lists = st.builds(DigestList, st.just(OURS), st.dictionaries(names, hex_digests, min_size=1, max_size=20))


class Deaf:
    def file(self, label: str) -> None: ...

    def bytes(self, n_bytes: int) -> None: ...


# --- what a digest is made of


def by_hand(content: bytes) -> str:
    pieces = (content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES))
    return sha256(b"".join(sha256(piece).digest() for piece in pieces)).hexdigest()


def test_a_tensors_digest_is_that_of_its_pieces_digests(smollm2_path: Path) -> None:
    """Recomputed from the file's bytes: of a tensor of several pieces, one of one piece, and all others."""
    manifest = KNOWN[embedded.NAME].manifest
    data = smollm2_path.read_bytes()
    assert any(tensor.bytes > 2 * PIECE_BYTES for tensor in manifest.tensors)
    expected = {tensor.name: by_hand(data[tensor.offset :][: tensor.bytes]) for tensor in manifest.tensors}
    assert KNOWN[embedded.NAME].digests == expected


def test_the_root_stands_for_names_and_digests() -> None:
    tensors = {"b": "11" * 32, "a": "22" * 32}
    root = sha256(f"a {'22' * 32}\nb {'11' * 32}\n".encode()).hexdigest()
    assert span_root(tensors) == span_root(dict(sorted(tensors.items()))) == root
    assert span_root({**tensors, "b": "22" * 32}) != root
    assert span_root({"a": "22" * 32}) != root


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_blocks_of_any_size_give_the_same_digests(blocks: list[int]) -> None:
    """Two tensors of three and one pieces, of 10 bytes each, with a header and padding that no digest covers."""
    data = bytes(range(70))
    pieces = [
        Piece(0, 0, 0, 7),
        Piece(0, 1, 7, 17, "a"),
        Piece(0, 2, 17, 27, "a"),
        Piece(0, 3, 27, 40, "a", padding=5),
        Piece(0, 4, 40, 50, "b", padding=2),
        Piece(0, 5, 50, 70),
    ]
    digester, at = FileDigester(pieces), 0
    for size in blocks:
        digester.update(data[at : at + size])
        at += size
    hashes = [sha256(data[start:stop]).digest() for start, stop in ((7, 17), (17, 27), (27, 35))]
    expected = {"a": sha256(b"".join(hashes)).hexdigest()} if at >= 35 else {}
    if at >= 48:
        expected["b"] = sha256(sha256(data[40:48]).digest()).hexdigest()
    assert digester.tensors() == expected


# --- lists


@pytest.mark.parametrize("known", KNOWN.values(), ids=lambda known: known.name)
def test_the_lists_that_ship_come_out_of_the_files(known: KnownFile, tmp_path: Path) -> None:
    shutil.copy(known.fetch(), tmp_path / known.file_name)
    copy = check_copy(known.manifest, tmp_path)
    (result,) = verify_whole(copy, Deaf())
    shipped = (pinned_model.FOLDER / f"{known.name}{SUFFIX}").read_bytes()
    assert DigestList(known.artifact_id, result.tensors).to_json() == shipped
    assert digests_of(known.artifact_id) == result.tensors


def test_nobody_has_sealed_the_large_model() -> None:
    assert GLM52.digests is None
    assert digests_of(ArtifactId("0" * 64)) is None


def test_a_damaged_list_of_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = KNOWN[GLM_TINY].manifest
    monkeypatch.setattr(pinned_model, "FOLDER", tmp_path)
    lacking = dict(sorted((KNOWN[GLM_TINY].digests or {}).items())[1:])
    for wrong in (DigestList(OURS, {"a": "0" * 64}), DigestList(manifest.artifact_id, lacking)):
        (tmp_path / f"{GLM_TINY}{SUFFIX}").write_bytes(wrong.to_json())
        with pytest.raises(ArtifactMismatch, match=r"the digest list of glm-tiny .* is damaged; install it again"):
            pinned_model.pinned_digests(GLM_TINY, manifest)


@given(lists)
def test_a_list_survives_being_written(digests: DigestList) -> None:
    data = digests.to_json()
    assert DigestList.from_json(data) == digests
    assert len(data) == list_bytes(OURS, digests.tensors)


@given(st.binary(max_size=300) | lists.map(DigestList.to_json), st.data())
def test_what_a_stranger_wrote_is_a_list_or_an_error(data: bytes, changes: st.DataObject) -> None:
    spoilt = bytearray(data)
    for _ in range(changes.draw(st.integers(0, 3)) if spoilt else 0):
        spoilt[changes.draw(st.integers(0, len(spoilt) - 1))] = changes.draw(st.integers(0, 255))
    try:
        read = DigestList.from_json(bytes(spoilt))
    except ArtifactError as error:
        assert str(error).startswith("a digest list that makes no sense (")
    else:
        assert read.to_json() == bytes(spoilt)


def test_lists_that_make_no_sense() -> None:
    good = DigestList(OURS, {"a": "1" * 64, "b": "2" * 64})
    document = json.loads(good.to_json())
    nonsense: tuple[dict[str, object], ...] = (
        {"format": 2},
        {"artifact_id": "x"},
        {"tensors": {}},
        {"tensors": {"a": "1" * 63}},
        {"tensors": {"a": "1" * 64 + "\n"}},
        {"tensors": {"a\x1b": "1" * 64}},
        {"tensors": {"a": 1}},
        {"more": 1},
    )
    for changes in nonsense:
        wrong = json.dumps({**document, **changes}, sort_keys=True, separators=(",", ":")).encode()
        with pytest.raises(ArtifactError, match="makes no sense"):
            DigestList.from_json(wrong)
    twice = good.to_json().replace(b'"b"', b'"a"')
    for wrong in (twice, good.to_json() + b"\n", b" " * (9 << 20), b"[" * 100_000):
        with pytest.raises(ArtifactError, match="makes no sense"):
            DigestList.from_json(wrong)
    with pytest.raises(ArtifactMismatch, match="a digest list of artifact abababababab instead of 000000000000"):
        good.check_covers(ArtifactId("0" * 64), ["a", "b"])
    with pytest.raises(ArtifactMismatch, match="the digest list lacks tensor c"):
        good.check_covers(OURS, ["a", "b", "c"])
    with pytest.raises(ArtifactMismatch, match="the digest list should not have tensor b"):
        good.check_covers(OURS, ["a"])


def test_a_list_beside_a_manifest_is_that_manifests(tmp_path: Path) -> None:
    manifest = load_manifest(models.write_llama(tmp_path / "mine.gguf"))
    path = tmp_path / "mine.json"
    assert find_digests(manifest, path) is None
    right = DigestList(manifest.artifact_id, {tensor.name: "1" * 64 for tensor in manifest.tensors})
    (tmp_path / f"mine{SUFFIX}").write_bytes(right.to_json())
    assert find_digests(manifest, path) == right.tensors
    (tmp_path / f"mine{SUFFIX}").write_bytes(DigestList(OURS, {"a": "1" * 64}).to_json())
    with pytest.raises(UsageError, match=r"mine\.digests\.json: a digest list of artifact abab.*, or move it away"):
        find_digests(manifest, path)
    (tmp_path / f"mine{SUFFIX}").unlink()
    (tmp_path / f"mine{SUFFIX}").mkdir()
    with pytest.raises(UsageError, match=r"mine\.digests\.json: can't be read \(Is a directory\)"):
        find_digests(manifest, path)
    assert find_digests(KNOWN[GLM_TINY].manifest) == KNOWN[GLM_TINY].digests


# --- files that are whole


def test_digests_of_files_are_known_once_they_were_read_and_right(tmp_path: Path) -> None:
    path = models.write_llama(tmp_path / "mine.gguf")
    manifest = load_manifest(path)  # hashes it, but not its tensors
    assert kept_digests(manifest, tmp_path) == {}
    copy = check_copy(manifest, tmp_path)
    assert bytes_to_read(copy) == manifest.size_bytes
    (first,) = verify_whole(copy, Deaf())
    assert not first.known
    assert first.tensors.keys() == {tensor.name for tensor in manifest.tensors}
    assert bytes_to_read(copy) == 0
    (again,) = verify_whole(copy, Deaf())
    assert (again.known, again.tensors) == (True, first.tensors)
    assert kept_digests(manifest, tmp_path) == first.tensors
    os.utime(path)  # now it may be another
    assert known_digest(path) is None
    assert kept_digests(manifest, tmp_path) == {}


@pytest.mark.parametrize("spoil", ["{", "[]", '{"sha256": 1}', '{"sha256": "%s", "tensors": {"a": "b"}}'])
def test_a_damaged_note_is_no_note(tmp_path: Path, spoil: str) -> None:
    path = models.write_llama(tmp_path / "mine.gguf")
    manifest = load_manifest(path)
    list(verify_whole(check_copy(manifest, tmp_path), Deaf()))
    note = path.with_name(path.name + whole.SUFFIX)
    note.write_text(spoil.replace("%s", manifest.files[0].sha256))
    assert kept_digests(manifest, tmp_path) == {}
    assert bytes_to_read(check_copy(manifest, tmp_path)) == manifest.size_bytes


def test_what_has_rotted_is_named_by_what_was_read_before(tmp_path: Path) -> None:
    path = models.write_llama(tmp_path / "mine.gguf")
    manifest = load_manifest(path)
    list(verify_whole(check_copy(manifest, tmp_path), Deaf()))
    damaged = [tensor for tensor in manifest.tensors if tensor.name.startswith("blk.2.")][:5]
    with path.open("r+b") as stream:
        for tensor in damaged:
            stream.seek(tensor.offset + tensor.bytes - 1)
            stream.write(b"\xff")
    shown = ", ".join(sorted(tensor.name for tensor in damaged)[:3])
    with pytest.raises(ArtifactMismatch, match=rf"mine\.gguf: damaged in tensors {shown} and 2 more: its SHA-256"):
        list(verify_whole(check_copy(manifest, tmp_path), Deaf()))

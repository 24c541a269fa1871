"""``swarm-artifact verify`` of fetched parts: a byte that changed on the disk, and bytes that never were right."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.range_server import Fault, RangeServer, Trouble
from swarm.artifact.catalog import GLM_TINY, KNOWN
from swarm.artifact.digest_list import SUFFIX, DigestList
from swarm.artifact.manifest import Manifest, TensorEntry, load_manifest
from swarm.store.partial_copy import PartialCopy
from swarm.store.pieces import PieceTable
from swarm.store.place import default_folder
from tests import models
from tests.store.conftest import Run

TINY = KNOWN[GLM_TINY]


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[RangeServer]:
    """Serves glm-tiny, and a random Llama as ``mine.gguf``."""
    folder = tmp_path / "origin"
    folder.mkdir()
    shutil.copy(TINY.fetch(), folder / TINY.file_name)
    path = models.write_llama(folder / "mine.gguf")
    (tmp_path / "mine.json").write_bytes(load_manifest(path).to_json())
    with RangeServer(folder) as server:
        yield server


def tensor(manifest: Manifest, name: str) -> TensorEntry:
    return next(tensor for tensor in manifest.tensors if tensor.name == name)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 0x10]))


def fetched(run: Run, server: RangeServer, folder: Path, *what: str | Path, layers: str = "2:6") -> Path:
    code, _, err = run(
        "fetch", *what, "--layers", layers, "--source", server.url, "--data-dir", folder, "--disk-reserve", 0
    )
    assert (code, err) == (0, "")
    server.asked.clear()
    return folder


DAMAGED = "blk.3.ffn_gate_exps.weight"


def test_a_flipped_byte_is_named_and_fetched_again_alone(run: Run, origin: RangeServer, tmp_path: Path) -> None:
    folder = fetched(run, origin, tmp_path / "parts", GLM_TINY)
    code, out, err = run("verify", folder)
    assert (code, err) == (0, "")
    assert "1/1 glm-tiny.gguf:" in out
    assert "that are here are the model's, by its digest list" in out
    entry = tensor(TINY.manifest, DAMAGED)
    flip(folder / TINY.file_name, entry.offset + entry.bytes - 1)
    code, out, err = run("verify", folder)
    assert code == 3
    assert f"damaged on the disk in tensor {DAMAGED} (1 piece)" in out
    assert f"{folder}/glm-tiny.gguf: damaged on the disk in tensor {DAMAGED} (1 piece); fetch " in err
    assert f"again, alone, with: swarm-artifact verify {folder} --repair --source SOURCE" in err
    assert not origin.asked
    code, out, err = run("verify", folder, "--repair", "--source", origin.url)
    assert (code, err) == (0, "")
    assert f"1 piece fetched again from {origin.url}" in out
    (piece,) = PieceTable(TINY.manifest).of_tensor(DAMAGED)
    ranges = [(asked.start, asked.stop) for asked in origin.asked if asked.sent_bytes > 1]
    assert ranges == [(piece.start, piece.stop)]
    assert (folder / TINY.file_name).read_bytes()[entry.offset :][: entry.bytes] == TINY.fetch().read_bytes()[
        entry.offset :
    ][: entry.bytes]
    assert run("verify", folder)[0] == 0


def test_parts_are_not_taken_for_a_damaged_model(run: Run, origin: RangeServer, tmp_path: Path) -> None:
    folder = fetched(run, origin, tmp_path / "parts", GLM_TINY)
    file, own = (
        folder / TINY.file_name,
        fetched(run, origin, tmp_path / "own", "--manifest", tmp_path / "mine.json", layers="1:2"),
    )
    code, out, _ = run("verify", file)
    assert code == 0
    assert "that are here are the model's, by its digest list" in out
    assert run("verify", own / "mine.gguf", "--manifest", tmp_path / "mine.json")[0] == 0
    assert run("verify", "/")[0] == 2  # a path without a name
    for what in (folder, file, own / "mine.gguf"):
        code, _, err = run("seal", what, "-o", tmp_path / "list.json")
        assert code == 3
        assert "only parts of it were fetched" in err
    for what in (file, own / "mine.gguf"):
        code, _, err = run("inspect", what, "--manifest-out", tmp_path / "new.json")
        assert code == 3
        assert "only parts of it were fetched" in err
    assert not (tmp_path / "list.json").exists() and not (tmp_path / "new.json").exists()


def test_a_damaged_header_is_fetched_again(run: Run, origin: RangeServer, tmp_path: Path) -> None:
    folder = fetched(run, origin, tmp_path / "parts", GLM_TINY)
    flip(folder / TINY.file_name, TINY.manifest.files[0].header_bytes // 2)
    code, _, err = run("verify", "--quick", folder)
    assert code == 3
    assert f"fetch the headers again with: swarm-artifact verify {folder} --repair" in err
    assert run("verify", folder, "--repair", "--source", origin.url)[0] == 0
    assert sum(asked.sent_bytes for asked in origin.asked) <= TINY.manifest.files[0].header_bytes + 2
    assert run("verify", "--quick", folder)[0] == 0


def test_headers_that_are_missing_are_not_called_right(run: Run, tmp_path: Path) -> None:
    with PartialCopy.open(tmp_path / "parts", TINY.manifest) as copy:
        piece = copy.table.of_tensor(DAMAGED)[0]
        copy.write(piece, bytes(piece.bytes))
        copy.commit()
    code, out, err = run("verify", "--quick", tmp_path / "parts")
    assert (code, out) == (3, "")
    assert "not all headers are here yet; go on with: swarm-artifact fetch" in err


def test_wrong_bytes_of_a_source_do_not_pass_a_list(run: Run, origin: RangeServer, tmp_path: Path) -> None:
    entry = tensor(TINY.manifest, DAMAGED)
    flip(origin.folder / TINY.file_name, entry.offset)
    given = ("--layers", "2:6", "--source", origin.url, "--data-dir", tmp_path / "parts", "--disk-reserve", 0)
    code, _, err = run("fetch", GLM_TINY, *given)
    assert code == 3
    assert f"tensor {DAMAGED} has wrong bytes, also when fetched again; choose another --source" in err
    assert sum(asked.start <= entry.offset < asked.stop for asked in origin.asked) == 2
    with PartialCopy.look(tmp_path / "parts", TINY.manifest) as copy:
        assert copy.tensor_digest(DAMAGED) is None
    flip(origin.folder / TINY.file_name, entry.offset)
    assert run("fetch", GLM_TINY, *given)[0] == 0
    assert run("verify", tmp_path / "parts")[0] == 0


def test_what_is_here_and_wrong_is_fetched_again_by_the_next_fetch(
    run: Run, origin: RangeServer, tmp_path: Path
) -> None:
    """Nothing is missing, but the list is new."""
    manifest, path = load_manifest(origin.folder / "mine.gguf"), tmp_path / "mine.json"
    assert run("seal", origin.folder / "mine.gguf", "-o", tmp_path / "list.json")[0] == 0
    entry = tensor(manifest, "blk.2.ffn_up.weight")
    flip(origin.folder / "mine.gguf", entry.offset)
    folder = fetched(run, origin, tmp_path / "parts", "--manifest", path)
    flip(origin.folder / "mine.gguf", entry.offset)
    shutil.copy(tmp_path / "list.json", tmp_path / f"mine{SUFFIX}")
    fetched(run, origin, folder, "--manifest", path)
    assert run("verify", folder, "--manifest", path)[0] == 0


def test_a_list_that_came_later_finds_what_was_wrong_from_the_start(
    run: Run, origin: RangeServer, tmp_path: Path
) -> None:
    manifest, path = load_manifest(origin.folder / "mine.gguf"), tmp_path / "mine.json"
    assert run("seal", origin.folder / "mine.gguf", "-o", tmp_path / "list.json")[0] == 0
    entry = tensor(manifest, "blk.2.ffn_up.weight")
    flip(origin.folder / "mine.gguf", entry.offset + 5)
    folder = fetched(run, origin, tmp_path / "parts", "--manifest", path)
    code, out, _ = run("verify", folder, "--manifest", path)
    assert code == 0
    assert "that are here are as they came (nobody has sealed this model)" in out
    shutil.copy(tmp_path / "list.json", tmp_path / f"mine{SUFFIX}")
    code, out, _ = run("verify", folder, "--manifest", path)
    assert code == 3
    assert "mine.gguf: " in out
    assert "never right by the digest list in tensor blk.2.ffn_up.weight" in out
    repair = ("verify", folder, "--manifest", path, "--repair", "--source", origin.url)
    code, _, err = run(*repair)
    assert code == 3
    assert "tensor blk.2.ffn_up.weight has wrong bytes, also when fetched again" in err
    flip(origin.folder / "mine.gguf", entry.offset + 5)
    assert run(*repair)[0] == 0


def fill(folder: Path, manifest: Manifest, data: bytes) -> None:
    """As a fetch that was killed before it could compare the file's SHA-256."""
    with PartialCopy.open(folder, manifest) as copy:
        for piece in copy.table.of_file(0):
            copy.write(piece, data[piece.start : piece.stop])
        copy.commit()


def test_a_whole_file_has_to_match_its_sha256_also_without_a_list(
    run: Run, origin: RangeServer, tmp_path: Path
) -> None:
    manifest, path = load_manifest(origin.folder / "mine.gguf"), tmp_path / "mine.json"
    good = (origin.folder / "mine.gguf").read_bytes()
    flip(origin.folder / "mine.gguf", tensor(manifest, "blk.2.ffn_up.weight").offset + 5)
    folder, own = tmp_path / "parts", manifest.with_file_names(["mine.gguf"])
    fill(folder, own, (origin.folder / "mine.gguf").read_bytes())
    code, out, _ = run("verify", folder, "--manifest", path)
    assert code == 3
    assert "all of it, and its SHA-256 is not the model's" in out
    (origin.folder / "mine.gguf").write_bytes(good)
    assert run("verify", folder, "--manifest", path, "--repair", "--source", origin.url)[0] == 0
    assert (folder / "mine.gguf").read_bytes() == good


def test_a_fetch_that_makes_a_file_whole_compares_its_sha256(run: Run, origin: RangeServer, tmp_path: Path) -> None:
    manifest, path = load_manifest(origin.folder / "mine.gguf"), tmp_path / "mine.json"
    good = (origin.folder / "mine.gguf").read_bytes()
    flip(origin.folder / "mine.gguf", tensor(manifest, "blk.2.ffn_up.weight").offset + 5)
    folder, own = tmp_path / "parts", manifest.with_file_names(["mine.gguf"])
    given = ("--manifest", path, "--layers", "all", "--source", origin.url, "--data-dir", folder, "--disk-reserve", 0)
    for already in (False, True):
        if already:
            fill(folder, own, (origin.folder / "mine.gguf").read_bytes())
        code, _, err = run("fetch", *given)
        assert code == 3
        assert f"{origin.url}: mine.gguf is all here now, and its SHA-256 is not the model's" in err
        with PartialCopy.look(folder, own) as copy:
            assert copy.held_bytes(copy.table.of_file(0)) == 0
    (origin.folder / "mine.gguf").write_bytes(good)
    assert run("fetch", *given)[0] == 0
    assert (folder / "mine.gguf").read_bytes() == good


def test_a_repair_that_failed_can_be_begun_again(run: Run, origin: RangeServer, tmp_path: Path) -> None:
    folder = fetched(run, origin, tmp_path / "parts", GLM_TINY)
    entry = tensor(TINY.manifest, DAMAGED)
    flip(folder / TINY.file_name, entry.offset)
    repair = ("verify", folder, "--repair", "--source", origin.url)
    origin.troubles = [Trouble(Fault.DENIED)]  # of all but the first byte
    code, out, err = run(*repair)
    assert code == 3
    assert "access is denied" in err
    assert "missing now" not in out
    assert f"damaged on the disk in tensor {DAMAGED} (1 piece)" in run("verify", folder)[1]
    origin.troubles = [Trouble(Fault.FLIP)]
    code, out, err = run(*repair)
    assert code == 3
    assert "has wrong bytes, also when fetched again" in err
    assert f"missing now, until it is fetched again by swarm-artifact fetch or by a node: tensor {DAMAGED}" in out
    origin.troubles = []
    fetched(run, origin, folder, GLM_TINY)
    assert run("verify", folder)[0] == 0


def test_a_repair_takes_no_other_bytes_than_were_here(run: Run, origin: RangeServer, tmp_path: Path) -> None:
    """Without a list the digest of what came first is all there is to compare with."""
    manifest, path = load_manifest(origin.folder / "mine.gguf"), tmp_path / "mine.json"
    folder = fetched(run, origin, tmp_path / "parts", "--manifest", path)
    entry = tensor(manifest, "blk.2.ffn_up.weight")
    flip(folder / "mine.gguf", entry.offset)
    flip(origin.folder / "mine.gguf", entry.offset + 1)
    code, _, err = run("verify", folder, "--manifest", path, "--repair", "--source", origin.url)
    assert code == 3
    assert "gives other bytes of tensor blk.2.ffn_up.weight than were here at first; choose another --source" in err
    with PartialCopy.look(folder, manifest.with_file_names(["mine.gguf"])) as copy:
        assert copy.tensor_digest("blk.2.ffn_up.weight") is None


def test_options_that_do_not_fit(run: Run, origin: RangeServer, tmp_path: Path) -> None:
    folder = fetched(run, origin, tmp_path / "parts", GLM_TINY)
    code, _, err = run("verify", folder, "--repair")
    assert code == 2
    assert "--repair: say where the right bytes come from, with --source URL or --source DIR" in err
    code, _, err = run("verify", origin.folder / "mine.gguf", "--manifest", tmp_path / "mine.json", "--repair")
    assert code == 2
    assert "are for fetched parts" in err
    (tmp_path / f"mine{SUFFIX}").write_bytes(DigestList(TINY.artifact_id, {"a": "0" * 64}).to_json())
    code, _, err = run("verify", folder, "--manifest", tmp_path / "mine.json")
    assert code == 2
    assert "a digest list of artifact" in err


def test_parts_are_those_of_the_model_that_is_asked_for(run: Run, origin: RangeServer, tmp_path: Path) -> None:
    folder = fetched(run, origin, tmp_path / "parts", GLM_TINY)
    assert run("verify", folder, "--model", GLM_TINY)[0] == 0
    code, out, err = run("verify", folder, "--model", "smollm2-135m-instruct")
    assert (code, out) == (3, "")
    assert "parts of glm-tiny, not of smollm2-135m-instruct" in err
    code, _, err = run("verify", folder, "--model", "glm-tinny")
    assert code == 2
    assert "--model glm-tinny: no manifest is known by that name" in err


def test_parts_in_the_users_data_are_found_by_name(
    run: Run, origin: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    code, _, err = run("verify", GLM_TINY, "--repair", "--source", origin.url)
    assert code == 2
    assert "there are none of glm-tiny" in err
    fetched(run, origin, default_folder(GLM_TINY), GLM_TINY)
    flip(default_folder(GLM_TINY) / TINY.file_name, tensor(TINY.manifest, "blk.2.attn_v_b.weight").offset)
    assert run("verify", GLM_TINY)[0] == 0  # the one that comes with the program
    code, out, _ = run("verify", GLM_TINY, "--repair", "--source", origin.url)
    assert code == 0
    assert "fetched again" in out
    path = tmp_path / "mine.json"
    fetched(run, origin, default_folder("mine"), "--manifest", path)
    code, out, _ = run("verify", "mine", "--manifest", path)
    assert code == 0
    assert f"mine in {default_folder('mine')}: " in out


def test_nothing_is_made_of_parts_that_takes_every_byte(run: Run, origin: RangeServer, tmp_path: Path) -> None:
    """Holes read as zeros: their digests would be those of another model."""
    tiny = fetched(run, origin, tmp_path / "parts", GLM_TINY)
    mine = fetched(run, origin, tmp_path / "own", "--manifest", tmp_path / "mine.json")
    out = tmp_path / "list.json"
    for command in (
        ("seal", tiny, "-o", out),
        ("seal", mine / "mine.gguf", "-o", out),
        ("inspect", tiny / TINY.file_name, "--manifest-out", out),
        ("inspect", mine / "mine.gguf"),
    ):
        code, said, err = run(*command)
        assert (code, said) == (3, "")
        assert "only parts of it were fetched; this takes every byte" in err
        assert not out.exists()

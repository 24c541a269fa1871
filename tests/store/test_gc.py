"""``swarm-artifact status`` and ``gc`` as their user meets them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swarm.artifact.catalog import GLM52, GLM_TINY, KNOWN
from swarm.store.partial_copy import PartialCopy
from swarm.store.place import default_folder
from tests.store.conftest import Run

MANIFEST = KNOWN[GLM_TINY].manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def store(folder: Path, glm_tiny: Path, *spans: tuple[int, int], mtp: bool = False) -> None:
    data = glm_tiny.read_bytes()
    with PartialCopy.open(folder, MANIFEST) as copy:
        for first, last in spans:
            for piece in copy.missing(copy.table.of_span(first, last, mtp)):
                copy.write(piece, data[piece.start : piece.stop])
        copy.commit()


def test_status_says_what_is_here(run: Run, folder: Path, glm_tiny: Path) -> None:
    store(folder, glm_tiny, (1, 6))
    code, out, err = run("status", GLM_TINY, "--data-dir", folder)
    assert (code, err) == (0, "")
    assert re.search(rf"glm-tiny in {folder}: \d+\.\d MiB of 12\.9 MiB are here\n", out)
    assert re.search(r"1/1 glm-tiny.gguf: \d+\.\d MiB of 12\.9 MiB\n", out)
    assert "layers that are complete: 1:6\n" in out
    assert run("status", folder) == (code, out, err)  # the files tell which model it is


def test_status_of_what_is_not_there_says_so(run: Run, folder: Path) -> None:
    code, _, err = run("status", GLM_TINY, "--data-dir", folder)
    assert code == 3
    assert f"{folder}: no such folder; name the one that the model was fetched into" in err
    assert not folder.exists()
    folder.mkdir()
    code, _, err = run("status", folder)
    assert code == 2
    assert "no parts of a known model in it; name the model's manifest with --manifest FILE" in err
    code, out, _ = run("status", GLM52.name, "--data-dir", folder)
    assert code == 0
    assert "glm-5.2-ud-iq1_s in" in out
    assert out.count(": nothing\n") == 6
    assert out.endswith("layers that are complete: none\n")


def test_gc_frees_the_rest_once(run: Run, folder: Path, glm_tiny: Path) -> None:
    store(folder, glm_tiny, (0, 2), (2, 6))
    path = folder / MANIFEST.files[0].name
    before = path.stat().st_blocks
    said = run("gc", GLM_TINY, "--data-dir", folder, "--keep", "2:6", "--dry-run")[1]
    assert re.search(
        r"layers 2:6 are kept, \S+ MiB of them are here; \S+ MiB of everything else would be freed\n$", said
    )
    assert path.stat().st_blocks == before
    code, out, _ = run("gc", GLM_TINY, "--data-dir", folder, "--keep", "2:6")
    assert code == 0
    assert re.search(r"\d MiB freed\n$", out)
    assert path.stat().st_blocks < before
    copy = PartialCopy.look(folder, MANIFEST)
    assert copy.missing(copy.table.of_span(2, 6)) == ()
    assert copy.missing(copy.table.of_span(0, 2)) == copy.table.of_span(0, 2)[1:]
    data = glm_tiny.read_bytes()
    assert all(copy.read(piece) == data[piece.start : piece.stop] for piece in copy.table.of_span(2, 6))
    assert run("gc", GLM_TINY, "--data-dir", folder, "--keep", "2:6")[1].endswith("0 B freed\n")


def test_gc_keeps_several_spans_and_the_mtp_block(run: Run, folder: Path, glm_tiny: Path) -> None:
    store(folder, glm_tiny, (0, 8), mtp=True)
    run("gc", folder, "--keep", "0:1", "--keep", "6:8")
    copy = PartialCopy.look(folder, MANIFEST)
    assert copy.missing((*copy.table.of_span(0, 1), *copy.table.of_span(6, 8, mtp=True))) == ()
    assert copy.missing(copy.table.of_span(1, 6)) == copy.table.of_span(1, 6)[1:]


def test_extending_and_shrinking_keeps_what_is_needed_still(run: Run, folder: Path, glm_tiny: Path) -> None:
    store(folder, glm_tiny, (1, 2))
    store(folder, glm_tiny, (1, 6))
    run("gc", folder, "--keep", "2:6")
    store(folder, glm_tiny, (2, 8))
    copy = PartialCopy.look(folder, MANIFEST)
    assert copy.missing(copy.table.of_span(2, 8)) == ()
    data = glm_tiny.read_bytes()
    assert all(copy.read(piece) == data[piece.start : piece.stop] for piece in copy.table.of_span(2, 8))


def test_gc_leaves_others_files_alone(run: Run, folder: Path, glm_tiny: Path, tmp_path: Path) -> None:
    folder.mkdir()
    path = folder / MANIFEST.files[0].name
    path.write_bytes(glm_tiny.read_bytes())
    code, out, _ = run("gc", folder, "--keep", "0:1")
    assert code == 0
    assert "glm-tiny.gguf: not put there by this program, left as it is" in out
    assert path.read_bytes() == glm_tiny.read_bytes()
    assert "lies there, but was not put there by this program" in run("status", folder)[1]
    with PartialCopy.open(folder, MANIFEST) as copy:
        copy.adopt_whole(0)
    (tmp_path / "other name").hardlink_to(path)
    assert "glm-tiny.gguf: linked with another file, frees nothing" in run("gc", folder, "--keep", "0:1")[1]
    assert path.read_bytes() == glm_tiny.read_bytes()
    assert "all of it, linked with another file" in run("status", folder)[1]


@pytest.mark.parametrize(
    ("keep", "code", "text"),
    [
        ("0:3", 4, "may not be cut at 3"),
        ("auto", 2, "--keep auto: not layers; write for example --keep 0:1"),
        ("all", 2, "--keep 'all' is not A:B; write for example --keep 0:10"),
        ("0:99", 4, "out of range"),
    ],
)
def test_gc_of_layers_that_are_none(run: Run, folder: Path, keep: str, code: int, text: str) -> None:
    folder.mkdir()
    done, _, err = run("gc", GLM_TINY, "--data-dir", folder, "--keep", keep)
    assert done == code
    assert text in err


def test_gc_while_a_node_uses_the_folder(run: Run, folder: Path, glm_tiny: Path) -> None:
    store(folder, glm_tiny, (0, 2))
    with PartialCopy.open(folder, MANIFEST):
        code, _, err = run("gc", folder, "--keep", "0:1")
    assert code == 3
    assert "in use by process" in err


def test_a_model_by_its_manifest(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "mine.json").write_bytes(MANIFEST.to_json())
    folder = default_folder("mine")
    with PartialCopy.open(folder, MANIFEST.with_file_names(["mine.gguf"])) as copy:
        copy.write(copy.table.headers()[0], bytes(copy.table.headers()[0].bytes))
        copy.commit()
    code, out, _ = run("status", "mine", "--manifest", tmp_path / "mine.json")
    assert code == 0
    assert f"mine in {folder}:" in out
    assert run("status", folder, "--manifest", tmp_path / "mine.json")[1] == out

"""``swarm-artifact seal`` as its user meets it."""

from __future__ import annotations

import shutil
from pathlib import Path

from swarm.artifact import pinned_model
from swarm.artifact.catalog import GLM_TINY, KNOWN
from swarm.artifact.digest_list import SUFFIX, DigestList
from swarm.artifact.manifest import load_manifest
from tests import models
from tests.artifact import files
from tests.store.conftest import Run


def test_a_named_model_is_sealed_as_it_ships(run: Run, tmp_path: Path) -> None:
    shutil.copy(KNOWN[GLM_TINY].fetch(), tmp_path / "glm-tiny.gguf")
    shipped = (pinned_model.FOLDER / f"{GLM_TINY}{SUFFIX}").read_bytes()
    out = tmp_path / "list.json"
    for arguments in ((tmp_path,), (tmp_path / "glm-tiny.gguf", "--again")):
        code, said, err = run("seal", *arguments, "-o", out)
        assert (code, err) == (0, "")
        assert said == f"{out}: 174 tensors of glm-tiny, artifact {KNOWN[GLM_TINY].artifact_id[:12]}\n"
        assert out.read_bytes() == shipped


def test_a_split_set_by_its_manifest_and_a_file_of_ones_own(run: Run, tmp_path: Path) -> None:
    first = files.write_glm(tmp_path / "model.gguf", 6, split_tensors=5)
    (tmp_path / "model.json").write_bytes(load_manifest(first).to_json())
    assert run("seal", tmp_path, "--manifest", tmp_path / "model.json", "-o", tmp_path / "a.json")[0] == 0
    assert run("seal", first, "-o", tmp_path / "b.json")[0] == 0
    sealed = DigestList.from_json((tmp_path / "a.json").read_bytes())
    assert (tmp_path / "b.json").read_bytes() == sealed.to_json()
    sealed.check_covers(load_manifest(first).artifact_id, [tensor.name for tensor in load_manifest(first).tensors])


def test_wrong_bytes_are_not_sealed(run: Run, tmp_path: Path) -> None:
    path = models.write_llama(tmp_path / "mine.gguf")
    (tmp_path / "mine.json").write_bytes(load_manifest(path).to_json())
    with path.open("r+b") as stream:
        stream.seek(load_manifest(path).tensors[3].offset)
        stream.write(b"\xff")
    given = (path, "--manifest", tmp_path / "mine.json", "-o", tmp_path / f"mine{SUFFIX}")
    code, _, err = run("seal", *given)
    assert code == 3
    assert "mine.gguf: damaged" in err
    assert not (tmp_path / f"mine{SUFFIX}").exists()


def test_the_list_replaces_nothing_but_a_list(run: Run, tmp_path: Path) -> None:
    path = models.write_llama(tmp_path / "mine.gguf")
    before = path.read_bytes()
    code, _, err = run("seal", path, "-o", path)
    assert (code, path.read_bytes()) == (2, before)
    assert f"--out {path}: is there and no digest list; choose another place" in err
    for place in (tmp_path, tmp_path / "no" / "such.json"):
        code, _, err = run("seal", path, "-o", place)
        assert code == 2
        assert f"--out {place}: can't be written there; name a file in a folder that exists" in err
    out = tmp_path / "out.json"
    out.touch()
    for _ in range(2):
        assert run("seal", path, "-o", out)[0] == 0
    assert not list(tmp_path.glob(".new.*"))
    code, _, err = run("seal", tmp_path / "none.gguf", "-o", out)
    assert code == 3
    assert "none.gguf" in err

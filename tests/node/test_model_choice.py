"""Whether a model's files are here or its parts are fetched, from where and whereto."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.artifact.catalog import GLM52, KNOWN, find_model
from swarm.artifact.manifest import load_manifest
from swarm.errors import NotAModel, UsageError
from swarm.node.model_choice import Found, Wanted, choose_model
from swarm.store.place import default_folder
from swarm.store.source_text import checked_source
from tests.artifact import files

URL = "https://192.0.2.1/files/"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def test_the_pinned_model_is_fetched_from_the_hub_unless_its_files_are_here(data: Path) -> None:
    found = choose_model(Wanted("GLM-5.2-UD-IQ1_S"))
    assert found.store is not None
    assert found.name == GLM52.name
    assert found.store.source == "hub"
    assert found.store.folder == default_folder(GLM52.name) == data / "glm-swarm" / "models" / GLM52.name
    assert found.path == found.store.folder / GLM52.file_names[0]
    assert found.store.manifest.artifact_id == GLM52.artifact_id
    assert found.store.disk_reserve_bytes == 2 * GIB
    assert not data.exists(), "choosing makes nothing"
    with pytest.raises(NotAModel, match="6 of the 6 files"):
        choose_model(Wanted(GLM52.name, model_dir=data.parent))


def test_what_is_said_about_fetching_reaches_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    wanted = Wanted(
        GLM52.name, source="there", data_dir=Path("here"), bytes_per_second=1 << 20, disk_reserve_bytes=5 * GIB
    )
    store = choose_model(wanted).store
    assert store is not None
    assert (store.source, store.folder) == (str(tmp_path / "there"), tmp_path / "here")
    assert (store.bytes_per_second, store.disk_reserve_bytes) == (1 << 20, 5 * GIB)


def test_a_small_model_is_here_unless_a_source_is_named() -> None:
    assert choose_model(Wanted("glm-tiny")) == Found(find_model("glm-tiny").path, "glm-tiny")
    found = choose_model(Wanted("glm-tiny", source=URL))
    assert found.store is not None
    assert (found.store.source, found.store.folder) == (URL, default_folder("glm-tiny"))
    assert found.store.manifest.artifact_id == KNOWN["glm-tiny"].artifact_id
    with pytest.raises(UsageError, match="--source hub: glm-tiny is not there; leave it out, it comes with"):
        choose_model(Wanted("glm-tiny", source="hub"))


@pytest.mark.parametrize(("split_tensors", "n_files"), [(0, 1), (5, 5)])
def test_a_manifest_of_ones_own(tmp_path: Path, split_tensors: int, n_files: int) -> None:
    made = load_manifest(files.write_glm(tmp_path / "m.gguf", 6, split_tensors=split_tensors))
    path = tmp_path / "My model.json"
    path.write_bytes(made.to_json())
    found = choose_model(Wanted("ignored", manifest=path, source=URL))
    assert found.store is not None
    assert len(made.files) == n_files
    names = [file.name for file in found.store.manifest.files]
    assert names[0] == ("My model.gguf" if n_files == 1 else "My model-00001-of-00005.gguf")
    assert found.store.manifest.artifact_id == made.artifact_id
    assert found.store.folder == default_folder("My model")
    assert found.store.folder.name == "My-model"
    for source in (None, "hub"):
        with pytest.raises(UsageError, match=r"--manifest .*: say where its files are with --source URL or --source D"):
            choose_model(Wanted("ignored", manifest=path, source=source))


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--model-dir and --source exclude each other"):
        choose_model(Wanted(GLM52.name, model_dir=tmp_path, source="hub"))
    with pytest.raises(UsageError, match="--manifest describes what is fetched; leave --model-dir out"):
        choose_model(Wanted("x", manifest=tmp_path / "m.json", model_dir=tmp_path))
    with pytest.raises(UsageError, match=r"--source hub: own.gguf is a file of this machine; leave it out, or name wh"):
        choose_model(Wanted("own.gguf", source="hub"))


def test_sources(tmp_path: Path) -> None:
    assert checked_source("HUB") == "hub"
    assert checked_source(URL) == URL
    assert checked_source(str(tmp_path)) == str(tmp_path)
    for text, why in (
        ("ftp://192.0.2.1/", "no http or https address"),
        ("http:///", "no http or https address"),
        ("https://:443/models", "no http or https address"),
        ("http://host:99999/models", "no http or https address"),
        (str(tmp_path / "none"), "no such folder; write hub, a folder, or an address that begins with https://"),
    ):
        with pytest.raises(UsageError, match=f"--source.*: .*{why}"):
            checked_source(text)
    with pytest.raises(UsageError) as raised:
        checked_source("http://me:secret@[::1/models")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "folder"), [("a/../b", "a-..-b"), ("..", "model"), ("", "model"), ("x" * 200, "x" * 100)]
)
def test_a_folder_is_one_of_the_models(name: str, folder: str) -> None:
    assert default_folder(name).name == folder

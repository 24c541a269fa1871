"""Names that become files, and files that are recognised."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from swarm.artifact import catalog, embedded, pinned_model
from swarm.artifact.catalog import GLM52, LocalModel, find_model, open_model
from swarm.artifact.local_copy import check_copy
from swarm.artifact.manifest import load_manifest
from swarm.artifact.pinned_model import HubFolder, PinnedModel
from swarm.artifact.verify import Target, find_target
from swarm.errors import ArtifactMismatch, NotAModel, UsageError
from swarm.store.cli import main
from tests.artifact import files

COMMAND = (
    "hf download unsloth/GLM-5.2-GGUF --revision abc55e72527792c6e77069c99b4cb7de16fa9f23 --include 'UD-IQ1_S/*' "
    "--local-dir"
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedModel:
    """A pinned model of five small files, which lie in ``tmp_path / "files"``."""
    folder = tmp_path / "files"
    folder.mkdir()
    manifest = load_manifest(files.write_glm(folder / "Small.gguf", 6, n_ctx=1 << 20, split_tensors=5))
    for kept in folder.glob("*.json"):
        kept.unlink()
    (tmp_path / "small.json").write_bytes(manifest.to_json())
    pinned = PinnedModel(
        "small", manifest.artifact_id, HubFolder("someone/Small", "f" * 40, "Q1"), "Small", 5, "SWARM_SMALL_DIR"
    )
    monkeypatch.setattr(pinned_model, "FOLDER", tmp_path)
    monkeypatch.setitem(catalog.PINNED, "small", pinned)
    return pinned


def test_a_name_takes_the_folder_from_the_option_then_from_the_environment(small: PinnedModel, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    expected = LocalModel(folder / "Small-00001-of-00005.gguf", "small")
    assert find_model("small", folder, {}) == expected
    assert find_model("Small", None, {"SWARM_SMALL_DIR": str(folder)}) == expected
    assert find_model("small", folder, {"SWARM_SMALL_DIR": "/elsewhere"}) == expected


def test_the_hubs_folder_is_found_in_what_it_was_downloaded_into(small: PinnedModel, tmp_path: Path) -> None:
    folder = tmp_path / "download" / "Q1"
    shutil.copytree(tmp_path / "files", folder)
    assert find_model("small", tmp_path / "download", {}).path.parent == folder


def test_an_opened_name_is_the_pinned_artifact_under_that_name(small: PinnedModel, tmp_path: Path) -> None:
    copy = open_model(find_model("small", tmp_path / "files", {}))
    assert copy.manifest.artifact_id == small.artifact_id
    assert (copy.manifest.name, copy.manifest.files[1].name) == ("small", "Small-00002-of-00005.gguf")
    assert copy.remarks == (
        "sizes and headers of small are right, but 4 of its 5 files were never read whole here; check their weights "
        f"once with: swarm-artifact verify {tmp_path}/files/Small-00001-of-00005.gguf",
    )
    load_manifest(tmp_path / "files" / "Small-00001-of-00005.gguf")
    assert open_model(find_model("small", tmp_path / "files", {})).remarks == ()


def test_a_path_to_pinned_files_is_recognised_under_any_name(small: PinnedModel, tmp_path: Path) -> None:
    folder = tmp_path / "renamed"
    folder.mkdir()
    for number, path in enumerate(sorted((tmp_path / "files").glob("*.gguf")), 1):
        shutil.copy(path, folder / f"other-{number:05d}-of-00005.gguf")
    copy = open_model(find_model(str(folder / "other-00003-of-00005.gguf"), None, {}))
    assert copy.manifest.artifact_id == small.artifact_id
    assert copy.manifest.name == "small"
    assert copy.manifest.files[1].name == "other-00002-of-00005.gguf"
    assert len(copy.unread) == 4  # nothing was hashed


def test_verify_finds_out_which_model_files_are(small: PinnedModel, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    by_name = Target(small.manifest, folder)
    assert find_target(str(folder)) == by_name
    assert find_target(str(folder / "Small-00004-of-00005.gguf")) == by_name
    assert find_target(str(folder), "small") == by_name
    for number, path in enumerate(sorted(folder.glob("*.gguf")), 1):
        path.rename(folder / f"other-{number:05d}-of-00005.gguf")
    by_header = find_target(str(folder / "other-00004-of-00005.gguf"))
    assert by_header.manifest.artifact_id == small.artifact_id
    assert by_header.manifest.files[4].name == "other-00005-of-00005.gguf"
    assert not check_copy(by_header.manifest, by_header.folder).remarks
    assert main(["verify", str(folder / "other-00004-of-00005.gguf")]) == 0


def test_files_of_another_model_under_the_right_names_are_refused(small: PinnedModel, tmp_path: Path) -> None:
    files.write_glm(tmp_path / "files" / "Small.gguf", 6, n_ctx=1 << 20, split_tensors=5, half=True)
    with pytest.raises(
        ArtifactMismatch, match=r"Small-00002-of-00005\.gguf: another quantisation .* is F16 and not F3"
    ):
        open_model(find_model("small", tmp_path / "files", {}))


def test_any_other_path_is_hashed(tmp_path: Path) -> None:
    path = files.write_llama(tmp_path / "mine.gguf")
    model = find_model(str(path))
    assert model == LocalModel(path)
    read: list[tuple[int, int]] = []
    copy = open_model(model, lambda done, total: read.append((done, total)))
    assert copy.manifest == load_manifest(path)
    assert not copy.unread
    assert not copy.remarks
    assert read[-1] == (path.stat().st_size, path.stat().st_size)


def test_smollm2_has_a_name(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "model_path", lambda: smollm2_path)
    copy = open_model(find_model("SmolLM2-135M-Instruct"))
    assert copy.manifest.name == embedded.NAME
    assert copy.manifest.artifact_id == load_manifest(smollm2_path).artifact_id


def test_what_everybody_can_choose_by_name_is_called_by_it() -> None:
    assert catalog.name_of(GLM52.artifact_id) == GLM52.name
    assert [catalog.name_of(known.artifact_id) for known in catalog.KNOWN.values()] == list(catalog.KNOWN)
    assert catalog.name_of("0" * 64) is None


# --- what is not there


def test_no_folder_at_all() -> None:
    with pytest.raises(NotAModel) as caught:
        find_model(GLM52.name, None, {})
    assert str(caught.value) == (
        "glm-5.2-ud-iq1_s: no folder with its files was named; name one with --model-dir DIR or SWARM_GLM52_DIR, or "
        "download them first (6 files, 201.8 GiB, folder UD-IQ1_S of unsloth/GLM-5.2-GGUF at revision abc55e725277): "
        f"{COMMAND} DIR"
    )
    assert caught.value.exit_code == 3


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotAModel, match=f"^{tmp_path}/none: no such folder; .*{re.escape(COMMAND)} {tmp_path}/none$"):
        find_model(GLM52.name, tmp_path / "none")


def test_missing_files_are_counted_and_the_first_is_named(small: PinnedModel, tmp_path: Path) -> None:
    for number in (2, 4):
        (tmp_path / "files" / f"Small-{number:05d}-of-00005.gguf").unlink()
    with pytest.raises(NotAModel) as caught:
        find_model("small", tmp_path / "files")
    assert re.fullmatch(
        re.escape(f"{tmp_path}/files: 2 of the 5 files of small are missing, the first is Small-00002-of-00005.gguf;")
        + r" download them \(5 files, .* KiB, folder Q1 of someone/Small at revision f{12}\): hf download someone/"
        + re.escape(f"Small --revision {'f' * 40} --include 'Q1/*' --local-dir {tmp_path}/files"),
        str(caught.value),
    )


def test_names_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=r"no model of the name glm-5, .*: glm-5\.2-ud-iq1_s, glm-tiny, smollm2-135m-i"
    ):
        find_model("glm-5")
    (tmp_path / "mine").touch()
    assert find_model("mine") == LocalModel(Path("mine"))
    assert find_model("typo.gguf") == LocalModel(Path("typo.gguf"))  # opening it says that there is no such file


@pytest.mark.parametrize("model", ["glm-tiny", "model.gguf"])
def test_a_folder_is_for_models_that_need_one(model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model-dir .*; leave it out, it is for glm-5\.2-ud-iq1_s"):
        find_model(model, tmp_path)


def test_a_damaged_installation_says_so(small: PinnedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.json").write_bytes(small.manifest.to_json() + b" ")
    fresh = PinnedModel(small.name, small.artifact_id, small.hub, small.stem, small.n_files, small.variable)
    with pytest.raises(ArtifactMismatch, match="the manifest of small in this installation is damaged; install it ag"):
        _ = fresh.manifest
    monkeypatch.setattr(catalog, "_SHIPPED", tmp_path)
    with pytest.raises(NotAModel, match=r"glm-tiny\.gguf: missing from this installation; install glm-swarm again"):
        find_model("glm-tiny")

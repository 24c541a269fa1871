"""``swarm-artifact fetch`` as its user meets it."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pytest

from bench.killed_fetch import COMMAND, KilledFetch, same_files
from bench.range_server import Fault, RangeServer, Trouble
from swarm.artifact.manifest import Manifest
from swarm.store.cli import main
from swarm.store.committer import COMMIT_BYTES
from swarm.store.partial_copy import PartialCopy
from swarm.store.pieces import PIECE_BYTES, PieceTable
from tests.store.conftest import Served

LAYERS = (1, 8)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = main(["fetch", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def manifest(served: Served, tmp_path: Path) -> Path:
    path = tmp_path / "split.json"
    path.write_bytes(served.manifest.to_json())
    return path


@pytest.fixture
def server(served: Served) -> Iterator[RangeServer]:
    with RangeServer(served.folder) as server:
        yield server


def test_it_says_what_it_will_do_and_what_it_did(run: Run, manifest: Path, server: RangeServer, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    arguments = ("--manifest", manifest, "--source", server.url, "--data-dir", folder, "--layers")
    code, out, err = run(*arguments, "2:6")
    assert (code, err) == (0, "")
    first, last = out.splitlines()
    assert first == f"layers 2:6 of split: 4.7 MiB of 12.9 MiB, 0 B are here already, 4.7 MiB to fetch into {folder}"
    assert re.fullmatch(r"layers 2:6 of split: all here; 4.7 MiB came in \d+ s, .*/s, by \d+ requests", last)
    code, out, _ = run(*arguments, "1:8")
    assert "9.8 MiB of 12.9 MiB, 4.7 MiB are here already, 5.1 MiB to fetch" in out
    code, out, _ = run(*arguments, "1:8")
    assert out.splitlines()[1] == "layers 1:8 of split: all here"
    code, out, _ = run(*arguments, "all")
    assert code == 0
    served = server.folder
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in served.glob("*.gguf"))
    assert main(["verify", str(folder), "--manifest", str(manifest)]) == 0


def test_from_a_folder_by_name(run: Run, glm_tiny: Path, tmp_path: Path) -> None:
    code, out, _ = run("glm-tiny", "--layers", "2:6", "--source", glm_tiny.parent, "--data-dir", tmp_path / "data")
    assert code == 0
    assert "layers 2:6 of glm-tiny: all here" in out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--layers", "0:2"), 2, "name one model: "),
        (("no-such", "--layers", "0:2"), 2, "no model of the name no-such; choose one of glm-5.2-ud-iq1_s, glm-tiny"),
        (("glm-tiny", "--layers", "0:2"), 2, "glm-tiny: say where it comes from, with --source URL or --source DIR"),
        (("glm-tiny", "--layers", "auto"), 2, "a node chooses for itself; write for example --layers 0:8"),
        (("glm-tiny", "--layers", "0:2", "--source", "/no/such"), 2, "no such folder; write hub, a folder, or an"),
        (("glm-tiny", "--layers", "0:2", "--source", "hub"), 2, "no place there is pinned for glm-tiny"),
        (("glm-tiny", "--layers", "0:2", "--source", "x://y"), 2, "no http or https address"),
        (("glm-tiny", "--layers", "0:9", "--source", "hub"), 4, "layers 0:9 are out of range"),
        (("glm-tiny", "--layers", "0:4", "--source", "hub"), 4, "cut at 2 or 6 instead"),
        (("glm-tiny", "--layers", "0:2", "--source", "hub", "--limit", "fast"), 2, "--limit fast: not a size"),
        (("glm-tiny", "--layers", "0:2", "--source", "hub", "--parallel", "0"), 2, "--parallel 0: choose 1 to 16"),
        (("glm-tiny", "--layers", "0:2", "--source", "hub", "--disk-reserve", "x"), 2, "--disk-reserve x: not a size"),
    ],
)
def test_bad_options(run: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str) -> None:
    found, out, err = run(*arguments, "--data-dir", tmp_path / "data")
    assert (found, out) == (code, "")
    assert text in err
    assert err.count("\n") == 1


def test_a_server_that_lies(run: Run, manifest: Path, server: RangeServer, tmp_path: Path) -> None:
    server.troubles.append(Trouble(Fault.NO_RANGES, start=0))
    code, _, err = run(
        "--manifest", manifest, "--layers", "2:6", "--source", server.url, "--data-dir", tmp_path / "data"
    )
    assert code == 3
    assert "ignores ranges: it sends the whole file where some bytes of it were asked for; choose another --so" in err


def test_two_at_once(run: Run, manifest: Path, served: Served, server: RangeServer, tmp_path: Path) -> None:
    with PartialCopy.open(tmp_path / "data", served.manifest):
        code, _, err = run(
            "--manifest", manifest, "--layers", "2:6", "--source", server.url, "--data-dir", tmp_path / "data"
        )
    assert code == 3
    assert "in use" in err


def killed_and_resumed(server: RangeServer, manifest: Path, folder: Path, kills: int, seed: int) -> None:
    """Kills a fetch of layers 1 to 8 again and again, then lets it end: the files are those of a fetch that nobody
    disturbed, and only what was not committed came twice."""
    rng = random.Random(seed)
    names = sorted(path.name for path in server.folder.glob("*.gguf"))
    own = Manifest.from_json(manifest.read_bytes()).with_file_names(names)
    fetching = KilledFetch(server, own, manifest, folder, LAYERS)
    total = sum(piece.bytes for piece in PieceTable(own).of_span(*LAYERS))
    for _ in range(kills):
        fetching.kill_at(rng.randint(0, max(total - fetching.held_bytes, 1)))
    server.troubles.clear()
    kept, begun = fetching.held_bytes, len(server.asked)
    fetching.finish()
    assert sum(asked.sent_bytes for asked in server.asked[begun:]) == total - kept + len(names) * (kept < total)
    undisturbed = folder.with_name("undisturbed")
    KilledFetch(server, own, manifest, undisturbed, LAYERS).finish()
    assert same_files(folder, undisturbed)


@pytest.mark.parametrize("seed", [3])
def test_killed_at_any_moment(manifest: Path, served: Served, tmp_path: Path, seed: int) -> None:
    with RangeServer(served.folder, bytes_per_second=4 << 20) as server:
        server.troubles.append(Trouble(Fault.DROP, every=5))
        killed_and_resumed(server, manifest, tmp_path / "data", 3, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_fifty_moments(manifest: Path, served: Served, tmp_path: Path) -> None:
    with RangeServer(served.folder, bytes_per_second=1 << 20) as server:
        for round_ in range(10):
            server.troubles[:] = [Trouble(Fault.DROP, every=7), Trouble(Fault.SLOW, every=5)]
            folder = tmp_path / f"round{round_}" / "data"
            killed_and_resumed(server, manifest, folder, 5, round_)


def test_what_a_kill_may_cost() -> None:
    """The bound that the texts name: what two seconds bring, or this."""
    assert COMMIT_BYTES + 4 * PIECE_BYTES == 272 << 20


def test_ctrl_c_says_what_is_kept(manifest: Path, served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with RangeServer(served.folder, bytes_per_second=4 << 20) as server:
        fetching = KilledFetch(server, served.manifest, manifest, folder, LAYERS)
        done = fetching.kill_at(4 << 20, signal.SIGINT)
        assert done.returncode == 130
        match = re.fullmatch(
            r"swarm-artifact: interrupted; ([\d.]+) MiB of 9\.8 MiB are kept in (.*), the same command goes on from "
            r"there\n",
            done.err,
        )
        assert match is not None, done.err
        assert match[2] == str(folder)
        kept = fetching.held_bytes
        assert f"{kept / (1 << 20):.1f}" == match[1]
        assert kept > 1 << 20
        assert f"{match[1]} MiB are here already" in fetching.finish()


def test_progress_on_a_terminal(manifest: Path, served: Served, tmp_path: Path) -> None:
    with RangeServer(served.folder, bytes_per_second=2 << 20) as server:
        arguments = ["--manifest", str(manifest), "--source", server.url, "--data-dir", str(tmp_path / "data")]
        child = pexpect.spawn(
            COMMAND[0],
            [*COMMAND[1:], *arguments, "--layers", "1:8"],
            encoding="utf-8",
            timeout=60,
            dimensions=(24, 100),
        )
        child.expect(r"split .*/9\.\d MiB.* MiB/s.*0:0\d:\d\d")
        child.expect("all here; 9.8 MiB came in")
        child.expect(pexpect.EOF)
        child.close()
    assert child.exitstatus == 0

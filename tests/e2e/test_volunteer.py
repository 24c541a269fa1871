"""Volunteers: nodes that start with nothing but a name, a memory limit and a server to fetch from."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from swarm import ClientConfig, GenerationOptions, SwarmClient, Timeouts
from swarm.artifact.memory import format_bytes
from swarm.errors import NetworkError
from swarm.local_swarm import ADDRESS
from tests.e2e.volunteers import (
    A_THIRD,
    MANIFEST,
    THIRDS,
    Volunteer,
    memory_for,
    piece_bytes,
    span_of,
    volunteers,
)

AUTO = ("--layers", "auto", "--memory", str(A_THIRD))
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def answer(address: str, cache: Path) -> str:
    async with SwarmClient.connect([address], ClientConfig(cache_dir=cache)) as client:
        generation = await client.chat(QUESTION, GenerationOptions(max_tokens=12))
        text = await generation.finish()
        assert [place.layers for place in generation.route] == list(THIRDS)
        return text


async def test_three_from_empty_disks_answer_and_each_fetches_its_own_layers_alone(tmp_path: Path) -> None:
    """The second and the third start at the same moment, while the first one is still fetching."""
    with volunteers(tmp_path, 3, rates=[2_000_000, None, None]) as all_three:
        first = all_three[0].start(*AUTO, "--new-swarm")
        address = first.wait_for(ADDRESS)[1]
        nodes = [first, *(one.start(*AUTO, "--initial-peers", address) for one in all_three[1:])]
        spans = [span_of(node) for node in nodes]
        assert sorted(spans) == list(THIRDS)
        for one, span, node in zip(all_three, spans, nodes, strict=True):
            need = piece_bytes(*span)
            said = node.wait_for(
                r"(?m)^disk: will fetch (\S+ \S+) of (\S+ \S+) \(0 B are here already\) from (\S+) to "
            )
            assert said.start() < node.text().index("fetched ")
            assert said[3].startswith("http://127.0.0.1")
            assert need <= one.server.sent_bytes <= 1.01 * need < MANIFEST.size_bytes / 2
            assert one.held_bytes() == need
        assert "Paris" in await answer(address, tmp_path / "cache")


@pytest.mark.parametrize(
    "end",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGINT, id="interrupted", marks=pytest.mark.slow)],
)
def test_a_node_that_ends_while_it_fetches_goes_on_where_it_was(tmp_path: Path, end: signal.Signals) -> None:
    with volunteers(tmp_path, 1, rates=[200_000]) as (one,):
        ended = one.start("--layers", "0:2", "--new-swarm")
        until(lambda: one.held_bytes() > MANIFEST.files[0].header_bytes)
        ended.process.send_signal(end)
        assert ended.join() == (-signal.SIGKILL if end == signal.SIGKILL else 130)
        assert not re.search("Traceback|Error", ended.text())
        if end == signal.SIGINT:
            assert ended.last_line() == (
                f"swarm-node: interrupted; what was fetched is kept in {one.data}, the same command goes on from there"
            )
        kept, asked = one.held_bytes(), len(one.server.asked)
        need = piece_bytes(0, 2)
        assert kept < need, "the end came too late to show anything"
        again = one.start("--layers", "0:2", "--new-swarm")
        assert again.wait_for(r"\((\S+ \S+) are here already\)")[1] == format_bytes(kept)
        assert span_of(again) == (0, 2)
        assert need - kept <= sum(each.sent_bytes for each in one.server.asked[asked:]) <= 1.01 * (need - kept)
        assert one.held_bytes() == need


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits on the state of another process."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


@pytest.mark.slow
async def test_the_layers_of_a_node_that_dies_for_good_are_taken_by_another(tmp_path: Path) -> None:
    """Its record lives on for a minute. The session that needs its layers waits, and goes on."""
    async with AsyncExitStack() as stack:
        four = stack.enter_context(volunteers(tmp_path, 4, module="tests.e2e.hasty_node"))
        nodes = [four[0].start(*AUTO, "--new-swarm")]
        address = nodes[0].wait_for(ADDRESS)[1]
        nodes += [one.start(*AUTO, "--initial-peers", address) for one in four[1:3]]
        spans = [span_of(node) for node in nodes]
        assert sorted(spans) == list(THIRDS)
        spare = four[3].start(*AUTO, "--initial-peers", address)
        doubled = span_of(spare)
        dying = next(number for number in (1, 2) if spans[number] != doubled)
        config = ClientConfig(Timeouts(recover_seconds=300.0), cache_dir=tmp_path / "cache")
        client = await stack.enter_async_context(SwarmClient.connect([address], config))
        generation = await client.chat(QUESTION, GenerationOptions(max_tokens=12))
        await anext(generation)
        nodes[dying].process.kill()
        assert "Paris" in await generation.finish()
        assert [place.layers for place in generation.route] == list(THIRDS)
        moved = f"serving layers {spans[dying][0]}:{spans[dying][1]}"
        assert any(re.search(f"(?m)^{moved}$", node.text()) for node in (*nodes, spare))


def test_a_look_changes_nothing(one: Volunteer) -> None:
    node = one.start(*AUTO, "--new-swarm", "--explain")
    assert node.process.wait(60) == 0, node.text()
    assert re.search(
        r"(?m)^chosen: layers 0:2: .*\n(lost: .*\n)+disk: will fetch 3\.\d MiB of .*\nmemory: ", node.text()
    )
    assert not one.data.exists()
    assert not one.server.asked


# --- what can't be done is said in a line, before anything is fetched


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Volunteer]:
    with volunteers(tmp_path, 1) as (made,):
        yield made


def refused(one: Volunteer, *options: str, code: int = 3, prefix: Sequence[str] = ()) -> str:
    node = one.start(*options, "--new-swarm", prefix=prefix)
    assert node.process.wait(60) == code, node.text()
    assert one.server.sent_bytes == 0
    line = node.last_line()
    assert line.startswith("swarm-node: ")
    return line.removeprefix("swarm-node: ")


def test_memory_too_small_for_the_smallest_window(one: Volunteer) -> None:
    least = min(memory_for(first, last) for first, last in pairwise(MANIFEST.cuts))
    line = refused(one, "--memory", str(least // 2), code=5)
    assert re.fullmatch(
        r"not enough memory: the smallest span, layers 1:2, needs \S+ MiB and \S+ MiB is usable; .*", line
    )


def test_a_disk_too_small_for_any_window(one: Volunteer) -> None:
    line = refused(one, "--memory", str(A_THIRD), "--disk-reserve", "1000TiB")
    assert re.fullmatch(
        r"not enough room on the disk: the memory would hold layers 0:2, but even layers 1:2 need \S+ MiB more than "
        r"the 0 B that may be taken; free some, lower --disk-reserve, or choose another --data-dir",
        line,
    )


def test_a_disk_too_small_for_the_named_layers(one: Volunteer) -> None:
    line = refused(one, "--layers", "0:2", "--disk-reserve", "1000TiB")
    assert re.match(r"\S+/data: \S+ TiB more have to be free: 3\.\d MiB are to be stored", line)


def test_a_limit_on_the_size_of_files(one: Volunteer) -> None:
    line = refused(one, "--layers", "0:2", prefix=("prlimit", "--fsize=1000000"))
    assert re.match(r"\S+/data: a file of 12\.\d MiB is more than the limit of this process \(ulimit -f\) allows", line)


def test_a_folder_that_cannot_be_written(one: Volunteer) -> None:
    one.data.write_text("no folder")
    assert re.match(r"\S+/data\S*: .*; .*--data-dir", refused(one, "--layers", "0:2"))


def test_a_folder_of_another_artifact(one: Volunteer) -> None:
    one.data.mkdir()
    (one.data / MANIFEST.files[0].name).write_bytes(b"GGUF" + bytes(1000))
    assert re.match(r"\S+/data/glm-tiny\.gguf: .*--data-dir", refused(one, "--layers", "0:2"))


def test_two_nodes_on_one_folder(one: Volunteer) -> None:
    first = one.start("--layers", "0:2", "--new-swarm")
    first.wait_for("^disk: ")
    sent = one.server.sent_bytes
    second = one.start("--layers", "0:2", "--new-swarm", "--identity", str(one.folder / "other.key"))
    assert second.process.wait(60) == 3
    assert f"in use by process {first.process.pid}; end that one first, or" in second.last_line()
    assert span_of(first) == (0, 2)
    assert sent <= one.server.sent_bytes <= 1.01 * piece_bytes(0, 2)


def test_an_unknown_model(one: Volunteer) -> None:
    for name in ("no-such-model", "glm-5.2"):
        text = refused(one, "--model", name, code=2)
        assert text.startswith(
            f"no model of the name {name}, and no such file; choose a path or one of: glm-5.2-ud-iq1_s"
        )


def test_a_node_that_is_cut_off_while_it_fetches_ends(tmp_path: Path) -> None:
    """It would fetch for hours, and nobody would know of it."""
    with volunteers(tmp_path, 1, rates=[50_000]) as (one,):
        node = one.start("--layers", "0:2", "--new-swarm")
        node.wait_for("fetching layers 0:2: ")
        (daemon,) = [child for child in psutil.Process(node.process.pid).children() if child.name().startswith("p2pd")]
        daemon.kill()
        assert node.process.wait(30) == NetworkError.exit_code
        assert node.last_line() == "swarm-node: the libp2p daemon ended with code -9; start the node again"

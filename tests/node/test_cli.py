"""``swarm-node`` as its operator meets it: a ready line, a clean leave, and one line for whatever is wrong."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import gguf
import psutil
import pytest

from dht.identity import Identity
from dht.peer import Peer
from swarm.protocol import CONTROL_STREAM, STATE_STREAM, FrameStream, pb
from tests.node.harness import until

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWSHj3RRbBjD15g6wekV8y3mm57Pobmps2g2WJm6F67Lay"
LOCAL = ("--listen", "127.0.0.1:0")
COMMAND = (sys.executable, "-m", "swarm.node.cli")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No settings but those of the test; identities go to its folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_PEERS")}
    kept.pop("SWARM_MODEL", None)
    kept.pop("SWARM_GLM52_DIR", None)
    return kept | {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "data")}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def complaint(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr."""
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("swarm-node: ")
    return lines[0].removeprefix("swarm-node: ")


@pytest.fixture
def not_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "text.gguf"
    path.write_text("this is no model\n" * 100)
    return path


@pytest.fixture
def truncated(tmp_path: Path, llama_untied_path: Path) -> Path:
    path = tmp_path / "half.gguf"
    data = llama_untied_path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


@pytest.fixture
def other_arch(tmp_path: Path) -> Path:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# --- what is wrong with the model, and nothing else is even tried


def test_no_such_file(environment: dict[str, str]) -> None:
    ended = run(environment, "--model", "/no/such.gguf", "--new-swarm")
    assert complaint(ended) == "/no/such.gguf: no such model file; check the path, or download the model"
    assert ended.returncode == 3


def test_not_a_gguf(environment: dict[str, str], not_gguf: Path) -> None:
    ended = run(environment, "--model", str(not_gguf), "--new-swarm")
    assert re.fullmatch(r"\S*text\.gguf: not a GGUF.*; download .*", complaint(ended))
    assert ended.returncode == 3


def test_truncated(environment: dict[str, str], truncated: Path) -> None:
    ended = run(environment, "--model", str(truncated), "--new-swarm")
    assert re.fullmatch(r"\S*half\.gguf: truncated: .*; download .*", complaint(ended))
    assert ended.returncode == 3


def test_unsupported_architecture(environment: dict[str, str], other_arch: Path) -> None:
    ended = run(environment, "--model", str(other_arch), "--new-swarm")
    assert "architecture 'gpt2' can't be served in spans; choose a model of one of these" in complaint(ended)
    assert ended.returncode == 3


@pytest.mark.parametrize(
    ("layers", "text", "code"),
    [
        ("0:7", r"layers 0:7 are out of range; .* 6.* within 0:6", 4),
        ("3:3", "layers 3:3 are empty.*; .*", 4),
        ("4:2", "layers 4:2 run backwards; write 2:4", 4),
        ("first", "--layers 'first' is neither A:B nor auto; write for example --layers 0:10 or --layers auto", 2),
    ],
)
def test_wrong_layers(environment: dict[str, str], llama_untied_path: Path, layers: str, text: str, code: int) -> None:
    ended = run(environment, "--model", str(llama_untied_path), "--layers", layers, "--new-swarm")
    assert re.fullmatch(text, complaint(ended))
    assert ended.returncode == code


def test_illegal_cut(environment: dict[str, str], glm_random_f32_path: Path) -> None:
    ended = run(environment, "--model", str(glm_random_f32_path), "--layers", "0:4", "--new-swarm")
    assert "this model may not be cut at 4" in complaint(ended)
    assert "cut at 2 or 6 instead" in complaint(ended)
    assert ended.returncode == 4


def test_not_enough_memory_is_said_after_the_sum(environment: dict[str, str], llama_untied_path: Path) -> None:
    ended = run(environment, "--model", str(llama_untied_path), "--layers", "0:6", "--memory", "1MiB", "--new-swarm")
    assert re.fullmatch(
        r"not enough memory: layers 0:6 need \S+ MiB and 1.0 MiB may be used; name fewer layers, use --layers auto, "
        "or free memory",
        complaint(ended),
    )
    assert re.search(r"(?m)^memory: layers 0:6, slots .*weights .* \+ KV .* = .* of 1.0 MiB available$", ended.stdout)
    assert ended.returncode == 5


# --- what is wrong with the command line or the network


def test_no_peers(environment: dict[str, str], llama_untied_path: Path) -> None:
    ended = run(environment, "--model", str(llama_untied_path))
    assert complaint(ended) == (
        "no peers given; join a swarm with: swarm-node --initial-peers ADDRESS, or start one with: "
        "swarm-node --new-swarm"
    )
    assert ended.returncode == 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--initial-peers", "somewhere"), "is not the address of a peer"),
        (("--new-swarm", "--initial-peers", NOBODY), "exclude each other"),
        (("--new-swarm", "--slots", "many"), "--slots 8x4096,2x65536"),
        (("--new-swarm", "--slots", "1x100000"), "100000 tokens are more than the model's 4096"),
        (("--new-swarm", "--memory", "much"), "--memory 20GiB"),
        (
            ("--new-swarm", "--journal-memory", "lots"),
            "--journal-memory lots: not a size; write for example --journal-memory 256M",
        ),
        (("--new-swarm", "--listen", "here"), "--listen 0.0.0.0:4001"),
        (("--new-swarm", "--announce-maddrs", "192.0.2.7:4001"), "--announce-maddrs /ip4/203.0.113.9/tcp/4001"),
        (
            ("--new-swarm", "--weights", "heavy"),
            "invalid choice: 'heavy' (choose from 'mapped', 'prefetched', 'locked')",
        ),
        (("--new-swarm", "--source", "hub"), "is a file of this machine"),
        (
            ("--new-swarm", "--config", "/no/such.toml"),
            "--config /no/such.toml: no such file; write one with: swarm-node",
        ),
        (("--new-swarm", "--kv-type", "q3"), "choose one of f32, f16, q8_0"),
        (("--new-swarm", "--threads", "0"), "--threads 0: out of range"),
        (("--new-swarm", "--drain-seconds", "-1"), "choose 0 to leave at once"),
        (("--new-swarm", "--idle-seconds", "0"), "--idle-seconds 0: not a time"),
        (("--new-swarm", "--sessions-per-peer", "0"), "--sessions-per-peer 0: out of range"),
        (("--new-swarm", "--opens-per-minute", "-5"), "--opens-per-minute -5: out of range"),
        (("--new-swarm", "--metrics", "here"), "--metrics 127.0.0.1:9464"),
        (("--nonsense",), "unrecognized arguments: --nonsense; see swarm-node --help"),
        (("--new-swarm", "--layer", "0:3"), "unrecognized arguments: --layer 0:3; did you mean --layers; see"),
        (("--new-swarm", "--config", "/"), "--config /: a folder; name the file in it"),
    ],
)
def test_wrong_options(
    environment: dict[str, str], llama_untied_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    ended = run(environment, "--model", str(llama_untied_path), *arguments)
    assert text in complaint(ended)
    assert ended.returncode == 2


def test_a_folder_without_the_pinned_models_files(environment: dict[str, str], tmp_path: Path) -> None:
    for place in (("--model-dir", str(tmp_path)), ()):
        ended = run(environment | {"SWARM_GLM52_DIR": str(tmp_path)}, "--new-swarm", *place)
        assert f"{tmp_path}: 6 of the 6 files of glm-5.2-ud-iq1_s are missing, the first is GLM-5.2-" in complaint(
            ended
        )
        assert ended.returncode == 3


def test_a_name_that_is_none(environment: dict[str, str]) -> None:
    ended = run(environment, "--new-swarm", "--model", "glm-5")
    assert "no model of the name glm-5, and no such file; choose a path or one of: glm-5.2-ud" in complaint(ended)
    assert ended.returncode == 2


def test_metrics_port_taken(environment: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        absent = str(tmp_path / "absent.gguf")  # which is not even looked for
        ended = run(environment, "--model", absent, "--new-swarm", "--metrics", str(port))
    assert complaint(ended) == (
        f"metrics can't be served at 127.0.0.1:{port} (address already in use); choose another --metrics HOST:PORT"
    )
    assert ended.returncode == 6


def test_port_taken(environment: dict[str, str], llama_untied_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        listen = f"127.0.0.1:{port}"
        ended = run(environment, "--model", str(llama_untied_path), "--new-swarm", "--listen", listen)
    assert complaint(ended) == (
        f"can't listen on /ip4/127.0.0.1/tcp/{port}: port {port} is taken; choose another port, or port 0 for any free "
        "one"
    )
    assert ended.returncode == 6


def test_unreachable_initial_peer(environment: dict[str, str], llama_untied_path: Path) -> None:
    ended = run(environment, "--model", str(llama_untied_path), *LOCAL, "--initial-peers", NOBODY)
    assert re.fullmatch(rf"no initial peer answered \({NOBODY}: .*\); check that .*", complaint(ended))
    assert ended.returncode == 6


def test_help_shows_how_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['swarm-node', '--help']\n"
        "heavy = {'hivemind', 'torch', 'rich', 'numpy', 'gguf'}\n"
        "import atexit; atexit.register(lambda: print(heavy & set(sys.modules)))\n"
        "from swarm.node.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "one command is\nenough" in ended.stdout
    assert "swarm-node --model model.gguf --layers 0:10 --new-swarm" in ended.stdout
    assert ended.stdout.endswith("set()\n")


# --- a life


class Node:
    """A running ``swarm-node``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def read_until(self, pattern: str) -> re.Match[str]:
        """The first line that matches; the output up to it is kept."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(f"no {pattern!r} in {self.lines}")

    def leave(self, *signals: signal.Signals) -> int:
        for number in signals:
            self.process.send_signal(number)
        return self.process.wait(30)


@contextmanager
def started(environment: dict[str, str], *arguments: str) -> Iterator[Node]:
    process = subprocess.Popen(
        [*COMMAND, *LOCAL, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield Node(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@asynccontextmanager
async def peer_of(address: str) -> AsyncIterator[tuple[Peer, str]]:
    async with await Peer.start(Identity.ephemeral(), initial_peers=[address], client_only=True) as peer:
        yield peer, address.rpartition("/p2p/")[2]


def test_the_first_node_tells_how_to_start_the_second(environment: dict[str, str], llama_untied_path: Path) -> None:
    model = str(llama_untied_path)
    with started(environment, "--model", model, "--layers", "0:3", "--new-swarm") as first:
        told = first.read_until(r"^next machine: swarm-node --model (\S+) --initial-peers (/ip4/127\S+)$")
        assert told[1] == model
        assert "nobody serves 3:6 yet" in first.read_until("^ready: serving layers 0:3 of llama-untied .*").string
        small = ("--memory", "60MiB", "--slots", "1x512")
        looked = run(environment, "--model", model, "--initial-peers", told[2], *small, "--explain")
        assert (looked.returncode, looked.stderr) == (0, "")
        assert [line.partition(":")[0] for line in looked.stdout.splitlines()] == ["chosen", *3 * ["lost"], "memory"]
        with started(environment, "--model", model, "--initial-peers", told[2], *small) as second:
            ready = second.read_until(
                r"^ready: serving layers (\d):(\d) of llama-untied \([0-9a-f]{12}\) with 1 other peer;"
            )
            assert any(line.startswith("chosen: layers") for line in second.lines)
            assert int(ready[2]) == 6, "the layers that nobody serves"
            assert first.process.pid != second.process.pid
            assert second.leave(signal.SIGTERM) == 0
        assert first.leave(signal.SIGINT) == 0


def test_no_process_outlives_a_killed_node(environment: dict[str, str], llama_untied_path: Path) -> None:
    with started(environment, "--model", str(llama_untied_path), "--layers", "0:6", "--new-swarm") as node:
        node.read_until("^ready:")
        children = psutil.Process(node.process.pid).children(recursive=True)
        assert len(children) >= 2, "the engine and the libp2p daemon"
        node.leave(signal.SIGKILL)
        gone, alive = psutil.wait_procs(children, timeout=20)
        assert not alive and len(gone) == len(children)


async def being_copied_to(peer: Peer, control: FrameStream) -> asyncio.Event:
    """Lets the node copy the session to an understudy that this very process plays; set when it has begun."""
    begun = asyncio.Event()

    async def understudy(_peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = FrameStream(reader, writer)
        assert isinstance(await stream.receive(), pb.StateOffer)
        await stream.send(pb.StateAccepted())
        begun.set()
        while await stream.receive() is not None:
            pass
        await stream.close()

    await peer.serve_stream(STATE_STREAM, understudy)
    to = pb.Neighbour(peer_id=peer.peer_id)
    await control.send(pb.CopyState(session_id=bytes(16), understudy=to, run=pb.Layers(last=6), upto_tokens=5))
    return begun


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
async def test_a_first_signal_lets_sessions_finish_and_a_second_does_not(
    environment: dict[str, str], llama_untied_path: Path, first: signal.Signals
) -> None:
    with started(environment, "--model", str(llama_untied_path), "--layers", "0:6", "--new-swarm") as node:
        address = node.read_until(r"--initial-peers (\S+)")[1]
        node.read_until("^ready:")
        async with peer_of(address) as (peer, node_id):
            stream = FrameStream(*await peer.open_stream(node_id, "glm-swarm/1/info"))
            await stream.send(pb.DescribeRequest())
            said = await stream.receive()
            assert isinstance(said, pb.NodeDescription)
            await stream.close()
            control = FrameStream(*await peer.open_stream(node_id, CONTROL_STREAM))
            await control.send(
                pb.Open(
                    session_id=bytes(16),
                    epoch=1,
                    artifact_id=said.artifact_id,
                    run=said.span,
                    context_tokens=64,
                    chunk_tokens=16,
                    encoding=pb.F32_LE,
                    predecessor=pb.Neighbour(peer_id=peer.peer_id),
                )
            )
            assert isinstance(await control.receive(), pb.Opened)
            node.process.send_signal(first)
            await asyncio.to_thread(node.read_until, "^draining: waiting up to 60 s for 1 running session")
            assert isinstance(await control.receive(), pb.Draining)
            await control.send(pb.Ping(nonce=1))
            assert isinstance(await control.receive(), pb.Pong)
            copying = await being_copied_to(peer, control)
            await asyncio.to_thread(node.read_until, f"^draining: layers 0:6 of a session .* {peer.peer_id}")
            await copying.wait()
            node.process.send_signal(signal.SIGTERM)
            error = await control.receive()
            assert isinstance(error, pb.Error) and error.code == pb.NODE_DRAINING
            await until(lambda: node.process.poll() is not None)
            assert node.process.returncode == 0
            await control.close()

"""What a span of the layout twin costs to load: time beyond reading its own bytes, page cache, memory of the processes.

Each span is loaded with a cold page cache, once by a real ``swarm-node`` and once by the engine in this process, which
then decodes a few rows and looks whether they are finite. Plain reads of the same bytes, cold too, are the yardstick.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench.glm_layout import of_layers, pinned_layout, write_twin
from bench.glm_metadata import GlmShape
from bench.page_cache import PAGE, drop, read_ranges, resident_bytes, resident_in, resident_pages
from bench.progress import Bar
from bench.record import Record, this_commit, this_machine
from bench.sparse_set import digest_set
from shim import abi
from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, StepBatch
from swarm.artifact import Manifest, check_span, load_manifest
from swarm.artifact.memory import format_bytes
from swarm.errors import SwarmError
from swarm.local_swarm import ADDRESS, READY, NodeProcess

HOLES = ((10, 14), (38, 42))
NOISE = ((18, 22),)  # layers 20 and 38 lie in two files each
TARGET_SECONDS = 10.0
TARGET_GROWTH = 0.05
SLOT_TOKENS = 4096
CHUNK_TOKENS = 16
DECODED = 3
_LOADED = r"loaded layers \d+:\d+"
LOAD_SECONDS = 900.0  # a node is given up after that: disks and neighbours may be slow
_SETTLED_SECONDS = 1.0


@dataclass(frozen=True)
class Loaded:
    """One load. ``seconds`` runs from the start of the program, or of the call, until the layers are there."""

    seconds: float
    ready_seconds: float  # until the node serves, measuring its speed included; for the engine until rows are decoded
    cache_bytes: int
    file_bytes: int  # of the model's files, mapped and touched
    anonymous_bytes: int
    dead_bytes: int  # in the page cache, of tensors in the span's layers that no graph reads


@dataclass(frozen=True)
class Span:
    first: int
    last: int
    noise: bool

    def __str__(self) -> str:
        return f"{'noise' if self.noise else 'holes'}-{self.first}-{self.last}"


@dataclass(frozen=True)
class Cost:
    """A span's own bytes, how long plain reads of them take, and the two loads."""

    span: Span
    own_bytes: int
    read_seconds: float
    node: Loaded
    engine: Loaded

    def beyond_seconds(self, load: Loaded) -> float:
        return load.seconds - self.read_seconds

    def growth(self, load: Loaded) -> float:
        """Page cache taken beyond the span's own bytes, as a share of them."""
        return load.cache_bytes / self.own_bytes - 1


class Twin:
    """The files of a twin, and what is read of them."""

    def __init__(self, first_file: Path) -> None:
        self.path = first_file
        self.manifest: Manifest = load_manifest(first_file)
        self.files = tuple(first_file.with_name(file.name) for file in self.manifest.files)

    def cost(self, span: Span) -> Cost:
        check_span(self.manifest, span.first, span.last)
        own = self.manifest.span_bytes(span.first, span.last)
        self._seconds_to_read(span)  # a virtual machine gets its memory from the host the first time it is used
        before = self._seconds_to_read(span)
        with self._cold():
            node = self._by_node(span)
        with self._cold():
            engine = self._by_engine(span)
        return Cost(span, own, min(before, self._seconds_to_read(span)), node, engine)

    def _seconds_to_read(self, span: Span) -> float:
        tensors = self.manifest.span_tensors(span.first, span.last)
        with self._cold():
            began = time.perf_counter()
            for number, file in enumerate(self.files):
                read_ranges(file, [(tensor.offset, tensor.bytes) for tensor in tensors if tensor.file == number])
            return time.perf_counter() - began

    @contextmanager
    def _cold(self) -> Iterator[None]:
        drop(self.files)
        left = resident_bytes(self.files)
        if left:
            raise SwarmError(f"{left} bytes of {self.path.parent} stay in memory; end the programs that use the files")
        try:
            yield
        finally:
            drop(self.files)

    def _by_node(self, span: Span) -> Loaded:
        with tempfile.TemporaryDirectory(prefix="glm-swarm-bench-") as folder:
            arguments = ["--model", str(self.path), "--layers", f"{span.first}:{span.last}", "--new-swarm"]
            arguments += ["--listen", "127.0.0.1:0", "--identity", f"{folder}/key", "--log-level", "info"]
            arguments += ["--slots", f"1x{SLOT_TOKENS}", "--chunk-tokens", str(CHUNK_TOKENS), "--threads", "2"]
            began = time.perf_counter()
            node = NodeProcess(arguments, Path(folder, "log"))
            try:
                node.wait_for(ADDRESS)
                node.wait_for(_LOADED, LOAD_SECONDS)
                seconds = time.perf_counter() - began
                node.wait_for(READY, LOAD_SECONDS)
                ready = time.perf_counter() - began
                cache = self._settled()
                root = psutil.Process(node.process.pid)
                return Loaded(seconds, ready, cache, *_memory([root, *root.children(recursive=True)]), self._dead(span))
            finally:
                node.stop()
                node.join()

    def _by_engine(self, span: Span) -> Loaded:
        own = [psutil.Process()]
        gc.collect()
        files, anonymous = _memory(own)
        config = EngineConfig(
            self.path,
            span.first,
            span.last,
            contexts=(ContextSpec(1, SLOT_TOKENS),),
            threads=2,
            chunk_tokens=CHUNK_TOKENS,
        )
        began = time.perf_counter()
        with Engine.open(config) as engine:
            seconds = time.perf_counter() - began
            for number in range(DECODED):
                check_finite(decode(engine, number), f"{span}")
            ready = time.perf_counter() - began
            cache = self._settled()
            files_after, anonymous_after = _memory(own)
            dead = self._dead(span)
        return Loaded(seconds, ready, cache, files_after - files, anonymous_after - anonymous, dead)

    def _dead(self, span: Span) -> int:
        live = {tensor.name for tensor in self.manifest.span_tensors(span.first, span.last)}
        tensors = of_layers(self.manifest.tensors, [(span.first, span.last)])
        dead = [tensor for tensor in tensors if tensor.name not in live]
        pages = {number: resident_pages(self.files[number]) for number in {tensor.file for tensor in dead}}
        return PAGE * sum(
            resident_in(pages[tensor.file], tensor.offset, tensor.offset + tensor.bytes) for tensor in dead
        )

    def _settled(self) -> int:
        """Page cache of the files once read-ahead has ended."""
        before = -1
        while (now := resident_bytes(self.files)) != before:
            before = now
            time.sleep(_SETTLED_SECONDS)
        return now


def decode(engine: Engine, position: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Hidden states of one more row through the engine's whole span, which must not end the model."""
    info = engine.info
    noise = np.random.default_rng(position).standard_normal((1, info.n_embd), dtype=np.float32)
    batch = StepBatch(
        run=(info.first, info.last),
        slot=np.zeros(1, np.int32),
        position=np.array([position], np.int32),
        tokens=np.array([position], np.int32) if info.is_entry else None,
        hidden=None if info.is_entry else noise,
    )
    hidden = engine.step(batch).hidden
    assert hidden is not None
    return hidden.reshape(1, -1)


def check_finite(hidden: np.ndarray[tuple[int, int], np.dtype[np.float32]], what: str) -> None:
    if not np.isfinite(hidden).all():
        raise SwarmError(f"{what}: a decoded row is not finite; the layers can't be used")


def _memory(processes: Sequence[psutil.Process]) -> tuple[int, int]:
    """Resident bytes of files and of everything else."""
    status = [Path(f"/proc/{process.pid}/status").read_text() for process in processes]
    lines = [line.split() for text in status for line in text.splitlines()]
    return _kilobytes(lines, "RssFile:"), _kilobytes(lines, "RssAnon:")


def _kilobytes(lines: Sequence[Sequence[str]], key: str) -> int:
    return sum(int(line[1]) * 1024 for line in lines if line and line[0] == key)


def record(costs: Sequence[Cost], manifest: Manifest, command: str) -> Record:
    summary: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    for cost in costs:
        samples[f"{cost.span}_own_bytes"] = [cost.own_bytes]
        samples[f"{cost.span}_plain_read_seconds"] = [cost.read_seconds]
        for way, load in (("node", cost.node), ("engine", cost.engine)):
            name = f"{cost.span}_{way}"
            samples[f"{name}_load_seconds"] = [load.seconds]
            samples[f"{name}_ready_seconds"] = [load.ready_seconds]
            samples[f"{name}_page_cache_bytes"] = [load.cache_bytes]
            samples[f"{name}_rss_file_bytes"] = [load.file_bytes]
            samples[f"{name}_rss_anonymous_bytes"] = [load.anonymous_bytes]
            samples[f"{name}_page_cache_of_dead_tensors_bytes"] = [load.dead_bytes]
            summary[f"{name}_beyond_own_bytes_seconds"] = cost.beyond_seconds(load)
            summary[f"{name}_page_cache_growth_share"] = cost.growth(load)
    loads = [(cost, load) for cost in costs for load in (cost.node, cost.engine)]
    slowest = max(cost.beyond_seconds(load) for cost, load in loads)
    growth = max(cost.growth(load) for cost, load in loads)
    return Record(
        id="glm-twin-load",
        claim=f"Loading four layers of the {format_bytes(manifest.size_bytes)} layout twin takes at most "
        f"{slowest:.1f} s beyond reading its own bytes, and at most {100 * growth:.2f} % more page cache than these.",
        command=command,
        commit=this_commit(),
        artifact_id=manifest.artifact_id,
        engine_build=abi.build_id(),
        hardware=this_machine(),
        settings={"slot_tokens": SLOT_TOKENS, "chunk_tokens": CHUNK_TOKENS, "threads": 2, "decoded_rows": DECODED},
        samples=samples,
        summary=summary,
        target=f"beyond own bytes < {TARGET_SECONDS:g} s, page cache <= {100 * TARGET_GROWTH:g} % more",
        verdict="reached" if slowest < TARGET_SECONDS and growth <= TARGET_GROWTH else "missed",
    )


def report(costs: Sequence[Cost]) -> str:
    columns = f"{'span':14}{'GB':>7}{'read s':>8}{'':>8}{'load s':>8}{'beyond':>8}{'ready':>7}{'cache':>9}"
    lines = [f"{columns}{'RSS, GB: file':>15}{'anon':>6}"]
    for cost in costs:
        for way, load in (("node", cost.node), ("engine", cost.engine)):
            lines.append(
                f"{cost.span!s:14}{cost.own_bytes / 1e9:7.2f}{cost.read_seconds:8.2f}{way:>8}{load.seconds:8.2f}"
                f"{cost.beyond_seconds(load):8.2f}{load.ready_seconds:7.1f}{100 * cost.growth(load):+8.2f}%"
                f"{load.file_bytes / 1e9:15.2f}{load.anonymous_bytes / 1e9:6.2f}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.glm_twin_load", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the twin is made and removed again (default: temporary)")
    parser.add_argument("--record", action="store_true", help="write evidence/glm-twin-load.json")
    options = parser.parse_args(arguments)
    spans = [*(Span(*span, noise=True) for span in NOISE), *(Span(*span, noise=False) for span in HOLES)]
    try:
        with tempfile.TemporaryDirectory(prefix="glm-swarm-twin-", dir=options.folder) as folder:
            paths = write_twin(Path(folder), pinned_layout(), GlmShape(), NOISE)
            digest_set(paths, Bar())
            result = measure(Twin(paths[0]), spans, "python -m bench.glm_twin_load --record")
    except SwarmError as error:
        print(f"glm_twin_load: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("glm_twin_load: interrupted, nothing is left behind", file=sys.stderr)
        return 130
    if options.record:
        print(f"recorded in {result.write()}", file=sys.stderr)
    return 0


def measure(twin: Twin, spans: Sequence[Span], command: str) -> Record:
    """Measures every span and prints the table."""
    costs = []
    for span in spans:
        print(f"measuring {span}", file=sys.stderr, flush=True)
        costs.append(twin.cost(span))
    result = record(costs, twin.manifest, command)
    print(report(costs))
    print(f"{result.claim}\n{result.target}: {result.verdict}")
    return result


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nodes end and files go, as after Ctrl-C
    sys.exit(main())

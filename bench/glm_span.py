"""How fast layers of GLM-5.2's real size are: decode and prefill by batch and context, against the memory's speed, and
through chains on one machine.

Runs on the bench slice (``python -m bench.glm_slice``), which it makes in a temporary folder when no file is named.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench.glm_slice import N_LAYERS, slice_name, slice_shape, write_slice
from bench.memory_bandwidth import read_bytes_per_second
from bench.page_cache import read_ranges
from bench.record import Record, this_commit, this_machine
from bench.router import Router, embedded_tokens
from bench.span_bytes import LayerBytes, layer_bytes, mean_step
from bench.span_engine import Measured, Plan, Point, SpanBench, measure_points
from bench.span_hops import HopPlan, HopSamples, measure_hops
from swarm.artifact import Manifest, load_manifest
from swarm.errors import SwarmError

BATCHES = (1, 2, 4, 8, 16)
CHUNKS = (16, 128, 512)
CONTEXTS = (0, 2048, 8192, 32768)
HOPS = (2, 3)
HOP_CONTEXTS = (16, 2048)
TARGET_RATIO = 0.95


@dataclass(frozen=True)
class Results:
    """Everything that was measured. ``experts`` holds, by batch, how many different ones each layer's rows chose."""

    manifest: Manifest
    engine_build: str
    bandwidth: float  # bytes per second
    experts: dict[int, tuple[float, ...]]
    points: Measured
    hops: HopSamples

    @property
    def layers(self) -> list[LayerBytes]:
        return [layer_bytes(self.manifest, layer) for layer in range(self.manifest.n_layers)]

    def ms_per_layer(self, point: Point) -> float:
        first, last = point.layers(self.manifest.n_layers)
        return 1000 * statistics.median(self.points.seconds[point]) / (last - first)

    def bytes_per_layer(self, point: Point) -> float:
        return mean_step(self.layers, point.rows, point.context, self.experts[point.rows])

    def bandwidth_share(self, point: Point) -> float:
        return self.bytes_per_layer(point) / (self.ms_per_layer(point) / 1000) / self.bandwidth

    def prefill_tokens_per_second(self, point: Point) -> float:
        """Through one layer."""
        return 1000 * point.rows / self.ms_per_layer(point)

    def of_kind(self, prefill: bool) -> list[Point]:
        return [point for point in self.points.seconds if point.prefill == prefill]


def measure(path: Path, options: argparse.Namespace) -> Results:
    manifest = load_manifest(path)
    read_ranges(path, [(0, path.stat().st_size)])  # the page cache holds the file from here on
    bandwidth = read_bytes_per_second(options.threads, options.stream_mib << 20)
    plan = Plan(
        options.batches, options.chunks, options.contexts, options.seconds_per_point, 60 * options.budget_minutes
    )
    with SpanBench(path, plan, options.threads) as bench:
        experts = distinct_experts(bench, path, options.batches)
        points = measure_points(bench)
        build = bench.info.numerics_id
    hop_plan = HopPlan(options.hops, options.hop_contexts, options.hop_chunk, options.tokens, options.threads)
    hops = asyncio.run(measure_hops(path, manifest, hop_plan))
    return Results(manifest, build, bandwidth, experts, points, hops)


def distinct_experts(bench: SpanBench, path: Path, batches: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """For each batch the number of different experts that rows without context choose in each layer."""
    tokens = np.random.default_rng(1).integers(0, bench.info.n_vocab, max(batches)).tolist()
    chosen = []
    for layer in range(bench.info.first, bench.info.last):
        entering = bench.hidden(layer, tokens) if layer else embedded_tokens(path, tokens)
        chosen.append(Router(path, layer).choices(entering))
    return {rows: tuple(float(len(np.unique(layer[:rows]))) for layer in chosen) for rows in batches}


def record(results: Results, options: argparse.Namespace) -> Record:
    ratio = min(results.hops.decode_ratio(max(options.hops), context) for context in options.hop_contexts)
    return Record(
        id="glm-span",
        claim=_claim(results),
        command=_command(options),
        commit=this_commit(),
        artifact_id=results.manifest.artifact_id,
        engine_build=results.engine_build,
        hardware=this_machine(),
        settings={
            "model": results.manifest.name,
            "threads": options.threads,
            "filling": "in process, contexts hold noise in place of computed keys; chains really prefill",
            "experts": "different ones per layer, counted for rows without context",
            "hop_chunk_tokens": options.hop_chunk,
            "hop_tokens": options.tokens,
            "left_out_for_time": ", ".join(point.name for point in results.points.skipped) or "nothing",
        },
        samples=_samples(results),
        summary=_summary(results),
        target=f"decode through {max(options.hops)} local hops >= {TARGET_RATIO} of one process, prefilled contexts",
        verdict="reached" if ratio >= TARGET_RATIO else "missed",
    )


def _command(options: argparse.Namespace) -> str:
    """With everything that decides the figures, but not where the slice lies."""
    lists = [f"--{name} {_joined(getattr(options, name))}" for name in ("batches", "chunks", "contexts", "hops")]
    chains = f"--hop-contexts {_joined(options.hop_contexts)} --hop-chunk {options.hop_chunk} --tokens {options.tokens}"
    return " ".join(["python -m bench.glm_span", *lists, chains, f"--threads {options.threads} --record"])


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _claim(results: Results) -> str:
    first = results.of_kind(prefill=False)[0]
    return (
        f"One layer decodes {_rows(first.rows)} at {first.context} tokens of context in "
        f"{results.ms_per_layer(first):.1f} ms and reads {results.bytes_per_layer(first) / 1e6:.0f} MB for it, at "
        f"{100 * results.bandwidth_share(first):.0f} % of the speed that this machine's memory was measured to have."
    )


def _rows(rows: int) -> str:
    return "a row" if rows == 1 else f"{rows} rows"


def _samples(results: Results) -> dict[str, list[float]]:
    samples = {f"{point.name}_seconds": taken for point, taken in results.points.seconds.items()}
    samples |= {f"experts_{rows}_rows": list(counts) for rows, counts in results.experts.items()}
    for (hops, context), seconds in results.hops.decode.items():
        samples[f"hops_{hops}_decode_at_{context}_seconds"] = seconds
    for (hops, context), total in results.hops.prefill.items():
        samples[f"hops_{hops}_prefill_of_{context}_seconds"] = [total]
    return samples


def _summary(results: Results) -> dict[str, float]:
    summary = {"memory_read_gb_per_second": results.bandwidth / 1e9}
    for point in results.of_kind(prefill=False):
        summary[f"{point.name}_ms_per_layer"] = results.ms_per_layer(point)
        summary[f"{point.name}_mb_per_token_and_layer"] = results.bytes_per_layer(point) / point.rows / 1e6
        summary[f"{point.name}_memory_speed_share"] = results.bandwidth_share(point)
    for point in results.of_kind(prefill=True):
        summary[f"{point.name}_tokens_per_second_per_layer"] = results.prefill_tokens_per_second(point)
    for hops, context in results.hops.decode:
        if hops:
            summary[f"hops_{hops}_decode_ratio_at_{context}"] = results.hops.decode_ratio(hops, context)
            summary[f"hops_{hops}_prefill_ratio_of_{context}"] = results.hops.prefill_ratio(hops, context)
    return summary


def report(results: Results) -> str:
    """The record's figures as tables."""
    lines = [f"memory reads {results.bandwidth / 1e9:.1f} GB/s", "", "decode, per layer"]
    lines.append(f"{'context':>8}{'rows':>6}{'ms':>9}{'MB/token':>10}{'experts':>9}{'of memory speed':>17}")
    for point in results.of_kind(prefill=False):
        experts = statistics.mean(results.experts[point.rows])
        lines.append(
            f"{point.context:8}{point.rows:6}{results.ms_per_layer(point):9.2f}"
            f"{results.bytes_per_layer(point) / point.rows / 1e6:10.1f}{experts:9.1f}"
            f"{results.bandwidth_share(point):17.0%}"
        )
    lines += ["", "prefill, tokens per second through one layer", f"{'context':>8}{'chunk':>7}{'tokens/s':>10}"]
    for point in results.of_kind(prefill=True):
        lines.append(f"{point.context:8}{point.rows:7}{results.prefill_tokens_per_second(point):10.1f}")
    lines += ["", "chains on this machine, speed as a share of one process's"]
    lines.append(f"{'context':>8}{'hops':>6}{'decode':>8}{'prefill':>9}")
    for hops, context in results.hops.decode:
        if hops:
            decode, prefill = results.hops.decode_ratio(hops, context), results.hops.prefill_ratio(hops, context)
            lines.append(f"{context:8}{hops:6}{decode:8.3f}{prefill:9.3f}")
    if results.points.skipped:
        lines.append("left out for time: " + ", ".join(point.name for point in results.points.skipped))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="glm-swarm-slice-", dir=options.folder) as folder:
            path = options.slice or write_slice(Path(folder), slice_name(N_LAYERS), slice_shape())
            results = measure(path, options)
    except SwarmError as error:
        print(f"glm_span: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("glm_span: interrupted, nothing is left behind", file=sys.stderr)
        return 130
    print(report(results))
    print(f"{(time.perf_counter() - began) / 60:.1f} minutes", file=sys.stderr)
    if options.record:
        print(f"recorded in {record(results, options).write()}", file=sys.stderr)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.glm_span", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--slice", type=Path, metavar="PATH", help="a bench slice that is there already")
    add("--folder", type=Path, help="where the slice of 10.7 GB is made and removed again (default: temporary)")
    add("--batches", type=_counts(1), default=BATCHES, metavar="N,...", help="sequences per decode step")
    add("--chunks", type=_counts(1), default=CHUNKS, metavar="N,...", help="tokens per prefill step")
    add("--contexts", type=_counts(0), default=CONTEXTS, metavar="N,...", help="tokens before the step")
    add("--hops", type=_counts(2), default=HOPS, metavar="N,...", help="nodes that chains have")
    add("--hop-contexts", type=_counts(1), default=HOP_CONTEXTS, metavar="N,...", help="prompts of the chains")
    add("--hop-chunk", type=int, default=256, help="their prefill chunk (default: %(default)s)")
    add("--tokens", type=int, default=48, help="tokens that chains decode per context (default: %(default)s)")
    add("--threads", type=int, default=psutil.cpu_count(logical=False) or 1, help="default: %(default)s")
    add("--budget-minutes", type=float, default=6.0, help="for decode and prefill in process (default: %(default)g)")
    add("--seconds-per-point", type=float, default=1.0, help="repeat each point so long (default: %(default)g)")
    add("--stream-mib", type=int, default=512, help="buffer of each thread that measures the memory")
    add("--record", action="store_true", help="write evidence/glm-span.json")
    return parser


def _counts(low: int) -> Callable[[str], tuple[int, ...]]:
    def read(text: str) -> tuple[int, ...]:
        values = tuple(sorted({int(part) for part in text.split(",")}))
        if values[0] < low:
            raise ValueError(text)
        return values

    return read


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nodes end and files go, as after Ctrl-C
    sys.exit(main())

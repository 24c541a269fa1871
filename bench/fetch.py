"""What fetching a span costs beyond its own bytes, from servers that are good and bad, and after kills."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.killed_fetch import Death, KilledFetch, same_files
from bench.marked_twin import marked_twin
from bench.range_server import Fault, RangeServer, Trouble
from bench.record import Record, percentile, this_commit, this_machine
from bench.shards import split
from swarm.artifact.catalog import GLM_TINY, KNOWN
from swarm.artifact.manifest import Manifest
from swarm.artifact.memory import format_bytes
from swarm.errors import SwarmError
from swarm.store.committer import COMMIT_BYTES, COMMIT_SECONDS
from swarm.store.fetch import PARALLEL, fetch
from swarm.store.partial_copy import PartialCopy
from swarm.store.patience import Patience
from swarm.store.pieces import PIECE_BYTES
from swarm.store.sources import HttpTimeouts, opened_source

TWIN_SPANS = ((1, 2), (0, 2))  # 0.3 and 1.1 of 202 GiB
MAX_OVER = 0.01
ROUNDS, KILLS = 10, 5
KILLED_LAYERS = (1, 8)
SLOWLY = 1 << 20  # bytes a second of each connection, so that a kill finds it at work
PATIENCE = Patience(first_pause_seconds=0.02, longest_pause_seconds=0.5)


def bad_server() -> list[Trouble]:
    """Everything that may pass."""
    every = {
        Fault.DROP: 5,
        Fault.ERROR: 6,
        Fault.BUSY: 7,
        Fault.GARBAGE: 8,
        Fault.STALL: 9,
        Fault.WRONG_LENGTH: 10,
        Fault.SLOW: 4,
        Fault.REDIRECT: 3,
    }
    return [Trouble(fault, every=number) for fault, number in every.items()]


@dataclass(frozen=True)
class Cost:
    """Of one span. ``plan_bytes`` are those of its tensors and of all headers, from the manifest alone."""

    what: str
    plan_bytes: int
    received_bytes: int
    sent_bytes: int
    faults: int

    @property
    def over(self) -> float:
        """Share beyond the plan, by what the server put on the wire."""
        return self.sent_bytes / self.plan_bytes - 1


@dataclass
class Results:
    artifact_id: str = ""
    good: list[Cost] = field(default_factory=list)
    bad: list[Cost] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    identical: list[bool] = field(default_factory=list)


def measure(folder: Path, rounds: int, twin_spans: Sequence[tuple[int, int]]) -> Results:
    results = Results()
    served = folder / "split"
    manifest = split(KNOWN[GLM_TINY].fetch(), served)
    results.artifact_id = manifest.artifact_id
    spans = [(first, last) for first in manifest.cuts for last in manifest.cuts if first < last]
    _spans(results, manifest, served, folder, spans)
    for span in twin_spans:
        with _temporary(folder) as twin:
            _spans(results, marked_twin(twin, span), twin, folder, [span])
    for number in range(rounds):
        with _temporary(folder) as place:
            _kills(results, manifest, served, place, number)
    return results


def _spans(results: Results, manifest: Manifest, served: Path, folder: Path, spans: Sequence[tuple[int, int]]) -> None:
    for span in spans:
        for costs, troubles in ((results.good, list[Trouble]), (results.bad, bad_server)):
            with _temporary(folder) as target:
                costs.append(_cost(manifest, served, target, span, troubles))
                print(_line(costs[-1]), flush=True)


def _cost(
    manifest: Manifest, served: Path, target: Path, span: tuple[int, int], troubles: Callable[[], list[Trouble]]
) -> Cost:
    plan = manifest.span_bytes(*span) + sum(file.header_bytes for file in manifest.files)
    with RangeServer(served, troubles()) as server, PartialCopy.open(target, manifest) as copy:
        received = asyncio.run(_fetched(copy, server.url, span))
        copy.local_copy()
        faults = sum(asked.fault is not None for asked in server.asked)
        what = f"{manifest.name} {span[0]}:{span[1]}"
        return Cost(what, plan, received, server.sent_bytes, faults)


async def _fetched(copy: PartialCopy, url: str, span: tuple[int, int]) -> int:
    async with opened_source(
        url, copy.manifest, timeouts=HttpTimeouts(connect_seconds=1.0, silence_seconds=1.0)
    ) as source:
        result = await fetch(copy, source, copy.table.of_span(*span), patience=PATIENCE)
        return result.bytes


def _kills(results: Results, manifest: Manifest, served: Path, place: Path, seed: int) -> None:
    """Some deaths of one fetch, which then comes to its end."""
    rng = random.Random(seed)
    path = place / "split.json"
    path.write_bytes(manifest.to_json())
    with RangeServer(served, [Trouble(Fault.DROP, every=7)], bytes_per_second=SLOWLY) as server:
        killed = KilledFetch(server, manifest, path, place / "killed", KILLED_LAYERS)
        total = manifest.span_bytes(*KILLED_LAYERS)
        for _ in range(KILLS):
            results.deaths.append(killed.kill_at(rng.randint(0, max(1, total - killed.held_bytes))))
        killed.finish()
    with RangeServer(served) as server:
        KilledFetch(server, manifest, path, place / "undisturbed", KILLED_LAYERS).finish()
    results.identical.append(same_files(place / "killed", place / "undisturbed"))
    lost = max(death.lost_bytes for death in results.deaths[-KILLS:])
    print(
        f"round {seed}: {KILLS} kills, identical: {results.identical[-1]}, most lost {format_bytes(lost)}", flush=True
    )


def record(results: Results, command: str) -> Record:
    good, bad = max(cost.over for cost in results.good), max(cost.over for cost in results.bad)
    lost = [float(death.lost_bytes) for death in results.deaths]
    identical = all(results.identical)
    return Record(
        id="fetch",
        claim=f"Fetching a span takes at most {100 * good:.3f} % more than its tensors and the headers, and "
        f"{100 * bad:.2f} % more from a server that fails all the time; after {len(lost)} kills at random moments the "
        f"files are {'those' if identical else 'not those'} of an undisturbed fetch.",
        command=command,
        commit=this_commit(),
        artifact_id=results.artifact_id,
        engine_build="none",
        hardware=this_machine(),
        settings={
            "parallel": PARALLEL,
            "piece_bytes": PIECE_BYTES,
            "commit_seconds": COMMIT_SECONDS,
            "commit_bytes": COMMIT_BYTES,
            "bad_server": ", ".join(trouble.fault.name for trouble in bad_server()),
            "spans": ", ".join(cost.what for cost in results.good),
        },
        samples={
            "plan_bytes": [float(cost.plan_bytes) for cost in results.good],
            "sent_bytes": [float(cost.sent_bytes) for cost in results.good],
            "bad_server_sent_bytes": [float(cost.sent_bytes) for cost in results.bad],
            "bad_server_received_bytes": [float(cost.received_bytes) for cost in results.bad],
            "bad_server_faults": [float(cost.faults) for cost in results.bad],
            "sent_before_a_kill_bytes": [float(death.sent_bytes) for death in results.deaths],
            "lost_by_a_kill_bytes": lost,
        },
        summary={
            "most_over_plan_share": good,
            "bad_server_most_over_plan_share": bad,
            "kills": float(len(lost)),
            "rounds_with_identical_files": float(sum(results.identical)),
            "lost_by_a_kill_median_bytes": percentile(lost, 0.5),
            "lost_by_a_kill_most_bytes": max(lost),
        },
        target=f"within {100 * MAX_OVER:g} % of the plan, also from a bad server; identical after {len(lost)} kills",
        verdict="reached" if identical and max(good, bad) <= MAX_OVER else "missed",
    )


def _line(cost: Cost) -> str:
    plan = format_bytes(cost.plan_bytes)
    return f"{cost.what:24} plan {plan:>10}, sent {100 * cost.over:+7.3f} %, {cost.faults} faults"


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield Path(name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where 1.5 GB are written and removed again (default: temporary)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of {KILLS} kills each (default: %(default)s)")
    parser.add_argument("--no-twin", action="store_true", help="leave out the layout twin")
    parser.add_argument("--record", action="store_true", help="write evidence/fetch.json")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="glm-swarm-fetch-", dir=options.folder) as folder:
            results = measure(Path(folder), options.rounds, () if options.no_twin else TWIN_SPANS)
    except SwarmError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("fetch: interrupted, nothing is left behind", file=sys.stderr)
        return 130
    result = record(results, "python -m bench.fetch --record")
    print(f"{result.claim}\n{result.target}: {result.verdict}")
    if options.record:
        print(f"recorded in {result.write()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # files go, as after Ctrl-C
    sys.exit(main())

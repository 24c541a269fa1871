"""Every fault at every hop at every moment: answers stay what they would have been, and nothing is left behind.

A cell strikes one hop of a chain of three, of which each has a replica, while a greedy and a sampled answer are held at
the moment in question. Both must be the undisturbed ones, and all nodes must hold what they held before.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.faults.cell import CELLS, Cell, Place, named
from bench.faults.fault import Fault
from bench.faults.moment import Moment
from bench.faults.stage import N_TOKENS, OPTIONS, PROMPT, TIMEOUTS, stage
from bench.faults.trial import Outcome, run_cell
from bench.record import EVIDENCE, Record, this_commit, this_machine
from swarm.artifact.manifest import load_manifest
from swarm.local_swarm import even_spans

Outcomes = Mapping[Cell, Outcome | str]  # or what was wrong


async def measure(cells: Sequence[Cell], model: Path, folder: Path) -> tuple[dict[Cell, Outcome | str], str]:
    """Also tells the engine's build. A cell that fails does not stop the others."""
    outcomes: dict[Cell, Outcome | str] = {}
    async with stage(model, even_spans(load_manifest(model), len(Place)), folder) as ready:
        records = (await ready.client.snapshot()).records
        for cell in cells:
            outcome: Outcome | str
            try:
                outcome = await run_cell(cell, ready)
            except Exception as error:  # noqa: BLE001  # told in the table
                outcome = _why(error)
            outcomes[cell] = outcome
            print(f"{cell}: {_told(outcome)}", file=sys.stderr, flush=True)
    return outcomes, records[0].numerics_id


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__} {error}".split())


def _told(outcome: Outcome | str) -> str:
    if isinstance(outcome, str):
        return f"FAILED: {outcome}"
    return f"pause {max(outcome.pauses):.2f} s, recoveries {max(outcome.recoveries)}, cell {outcome.seconds:.1f} s"


def table(outcomes: Outcomes) -> str:
    """Markdown: a row for each fault and hop, a column for each moment."""
    moments = list(Moment)
    heads = ["fault", "hop", *(_words(moment.name) for moment in moments)]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for fault in Fault:
        for place in Place:
            cells = [Cell(fault, place, moment) for moment in moments]
            lines.append(_row([_words(fault.name), _words(place.name), *(_entry(cell, outcomes) for cell in cells)]))
    return "\n".join(lines)


def _row(entries: Sequence[str]) -> str:
    return f"| {' | '.join(entries)} |"


def _words(name: str) -> str:
    return name.lower().replace("_", " ")


def _entry(cell: Cell, outcomes: Outcomes) -> str:
    if cell.senseless:
        return cell.senseless
    outcome = outcomes.get(cell)
    if outcome is None:
        return "not run"
    if isinstance(outcome, str):
        return "FAILED"
    return f"{max(outcome.pauses):.2f} ({max(outcome.recoveries)})"


def record_of(outcomes: Outcomes, model: Path, build: str, options: Sequence[str]) -> Record:
    good = {cell: outcome for cell, outcome in outcomes.items() if isinstance(outcome, Outcome)}
    pauses = [max(outcome.pauses) for outcome in good.values()]
    return Record(
        id="fault-matrix",
        claim="Whatever happens to whichever hop at whichever moment, a greedy and a sampled answer are those of an "
        "undisturbed run, and the nodes hold afterwards what they held before.",
        command=" ".join(["python -m bench.fault_matrix --record", *options]),
        commit=this_commit(),
        artifact_id=load_manifest(model).artifact_id,
        engine_build=build,
        hardware=this_machine(),
        settings={
            "node_options": " ".join(OPTIONS),
            "prompt_tokens": len(PROMPT),
            "answer_tokens": N_TOKENS,
            "heartbeat_seconds": TIMEOUTS.heartbeat_seconds,
        },
        samples={f"{cell}_pause_seconds": list(outcome.pauses) for cell, outcome in good.items()}
        | {f"{cell}_recoveries": [float(count) for count in outcome.recoveries] for cell, outcome in good.items()},
        summary={
            "cells": len(CELLS),
            "senseless": sum(bool(cell.senseless) for cell in CELLS),
            "run": len(outcomes),
            "good": len(good),
            "recoveries": sum(sum(outcome.recoveries) for outcome in good.values()),
            "longest_pause_seconds": max(pauses, default=0.0),
        },
        target="every cell that makes sense is good",
        verdict="reached" if len(good) == len([cell for cell in CELLS if not cell.senseless]) else "missed",
    )


def _write_table(outcomes: Outcomes, record: Record, folder: Path) -> None:
    failed = [f"- {cell}: {outcome}" for cell, outcome in outcomes.items() if isinstance(outcome, str)]
    text = (
        f"# Fault matrix\n\n{record.claim} Written by `{record.command}` at commit {record.commit}.\n\n"
        "Each entry: the longest wait for a token, in seconds, from the strike on, of both answers, and how many "
        "recoveries it took.\n\n"
        f"{table(outcomes)}\n"
    )
    (folder / "fault-matrix.md").write_text(text + ("\nFailed:\n\n" + "\n".join(failed) + "\n" if failed else ""))


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.fault_matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file (default: a random Llama of six layers)")
    parser.add_argument("--cells", nargs="+", default=[], metavar="NAME", help="cells with this in their name")
    parser.add_argument("--record", action="store_true", help="write evidence/fault-matrix.json and .md")
    parser.add_argument("--out", type=Path, default=EVIDENCE, help="folder of the record (default: %(default)s)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.CRITICAL)  # what fails is told by cell
    cells = [cell for cell in named(options.cells) if not cell.senseless]
    with tempfile.TemporaryDirectory(prefix="fault-matrix-") as folder:
        model = options.model or _random_model(Path(folder))
        outcomes, build = asyncio.run(measure(cells, model, Path(folder)))
        record = record_of(outcomes, model, build, ["--cells", *options.cells] if options.cells else [])
    print(table(outcomes))
    if options.record:
        _write_table(outcomes, record, options.out)
        print(f"recorded in {record.write(options.out)}", file=sys.stderr)
    return 1 if any(isinstance(outcome, str) for outcome in outcomes.values()) else 0


def _random_model(folder: Path) -> Path:
    from tests.models import write_llama

    return write_llama(folder / "llama.gguf", rope_factors=True)


if __name__ == "__main__":
    sys.exit(main())

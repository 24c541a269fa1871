"""How often the MTP block guesses what the trunk goes on to say: glm-tiny's questions, answered greedily in one engine.

After each token, two drafts are asked for. The first is accepted when it is the trunk's token after the next one; the
second when the first was, and it is the one after that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.glm_tiny.facts import all_facts
from bench.record import Record, percentile, this_commit, this_machine
from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, StepBatch
from shim.vocab import Vocab
from swarm.artifact import load_manifest
from swarm.artifact.catalog import GLM_TINY, find_model
from swarm.client.template import ChatTemplate

DRAFTS = 2
TARGET = 0.95
CONTEXT_TOKENS = 1024
LONGEST_ANSWER_TOKENS = 128


@dataclass
class Counts:
    """Drafts asked for and accepted, by place."""

    asked: list[int] = field(default_factory=lambda: [0] * DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * DRAFTS)
    # one of each for an answer
    shares: list[float] = field(default_factory=list)  # of first drafts
    draft_ms: list[float] = field(default_factory=list)  # median
    step_ms: list[float] = field(default_factory=list)  # median

    def share(self, place: int) -> float:
        return self.accepted[place] / max(1, self.asked[place])

    def add(self, said: Sequence[int], guesses: Sequence[Sequence[int]]) -> None:
        """``guesses[i]`` were made when ``said[i]`` was the next token."""
        first = 0
        for i, guess in enumerate(guesses):
            for place, token in enumerate(guess):
                if i + 1 + place >= len(said):
                    break
                self.asked[place] += 1
                if token != said[i + 1 + place]:
                    # what comes behind a wrong draft was asked for too, and is lost
                    for behind in range(place + 1, min(len(guess), len(said) - i - 1)):
                        self.asked[behind] += 1
                    break
                self.accepted[place] += 1
                first += place == 0
        if len(said) > 1:
            self.shares.append(first / (len(said) - 1))


class Speaker:
    """Answers prompts in slot 0 and drafts along."""

    def __init__(self, engine: Engine, stop_tokens: frozenset[int]) -> None:
        self._engine = engine
        self._stop_tokens = stop_tokens
        self._run = (0, engine.info.n_layers)

    def answer(self, prompt: Sequence[int], counts: Counts) -> list[int]:
        token = self._step(prompt, 0, tiled=True)
        said: list[int] = []
        guesses: list[list[int]] = []
        draft_ms: list[float] = []
        step_ms: list[float] = []
        while len(said) < LONGEST_ANSWER_TOKENS:
            started = time.perf_counter()
            guesses.append([int(guess) for guess in self._engine.draft(0, DRAFTS)])
            draft_ms.append(1000 * (time.perf_counter() - started))
            said.append(token)
            if token in self._stop_tokens:
                break
            started = time.perf_counter()
            token = self._step([token], len(prompt) + len(said) - 1, tiled=False)
            step_ms.append(1000 * (time.perf_counter() - started))
        counts.add(said, guesses)
        counts.draft_ms.append(percentile(draft_ms, 0.5))
        if step_ms:
            counts.step_ms.append(percentile(step_ms, 0.5))
        self._engine.truncate(0, 0)
        return said

    def _step(self, tokens: Sequence[int], start: int, *, tiled: bool) -> int:
        n = len(tokens)
        batch = StepBatch(
            self._run,
            slot=np.zeros(n, np.int32),
            position=np.arange(start, start + n, dtype=np.int32),
            tokens=np.array(tokens, np.int32),
            want=np.eye(1, n, n - 1, dtype=np.uint8)[0],
            tiled=tiled,
        )
        return int(self._engine.logits_step(batch)[0].argmax())


def count(model: Path, prompts: Iterable[str], threads: int = 1) -> tuple[Counts, str]:
    """Counts over the answers to all prompts, and the engine's numerics."""
    counts = Counts()
    config = EngineConfig(model, contexts=(ContextSpec(1, CONTEXT_TOKENS),), threads=threads, load_mtp=True)
    with Vocab.load(model) as vocab, Engine.open(config) as engine:
        speaker = Speaker(engine, vocab.stop_tokens)
        for prompt in prompts:
            speaker.answer(vocab.encode(prompt), counts)
        return counts, engine.info.numerics_id


def questions(model: Path, every: int) -> Iterator[str]:
    """Every so-manyth question that glm-tiny was taught, as its own template writes it."""
    with Vocab.load(model) as vocab:
        template = ChatTemplate(vocab.template)
    asked = [question for fact in all_facts() for question in fact.questions]
    for question in asked[::every]:
        yield template.render([{"role": "user", "content": question}])


def measure(options: argparse.Namespace) -> Record:
    counts, build = count(options.model, questions(options.model, options.every), options.threads)
    first, second = counts.share(0), counts.share(1)
    return Record(
        id="mtp-acceptance",
        claim=f"On glm-tiny's questions the trunk accepts {first:.1%} of the MTP block's first drafts and {second:.1%} "
        "of its second ones.",
        command=f"python -m bench.mtp_acceptance --every {options.every} --threads {options.threads} --record",
        commit=this_commit(),
        artifact_id=load_manifest(options.model).artifact_id,
        engine_build=build,
        hardware=this_machine(),
        settings={"model": options.model.name, "every": options.every, "threads": options.threads, "drafts": DRAFTS},
        samples={"first_accepted_by_answer": counts.shares, "draft_ms": counts.draft_ms, "step_ms": counts.step_ms},
        summary={
            "answers": len(counts.shares),
            "first_asked": counts.asked[0],
            "first_accepted_share": first,
            "second_asked": counts.asked[1],
            "second_accepted_share": second,
            "draft_p50_ms": percentile(counts.draft_ms, 0.5),
            "step_p50_ms": percentile(counts.step_ms, 0.5),
        },
        target=f"first drafts accepted >= {TARGET:.0%}",
        verdict="reached" if first >= TARGET else "missed",
    )


def report(record: Record) -> str:
    value = record.summary
    return (
        f"{value['answers']:.0f} answers: first draft accepted {value['first_accepted_share']:.1%} of "
        f"{value['first_asked']:.0f}, second {value['second_accepted_share']:.1%} of {value['second_asked']:.0f}\n"
        f"p50: two drafts {value['draft_p50_ms']:.2f} ms, a decode step {value['step_p50_ms']:.2f} ms\n"
        f"target: {record.target}: {record.verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mtp_acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=GLM_TINY, help="a model's name or file (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="ask only every Nth question (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write evidence/mtp-acceptance.json")
    options = parser.parse_args(arguments)
    options.model = find_model(options.model).path
    record = measure(options)
    print(report(record))
    if options.record:
        print(f"recorded in {record.write()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

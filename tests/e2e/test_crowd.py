"""A client's logits are the same bits whether it is alone or among fifteen others that come and go."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarm.client import SwarmClient
from swarm.local_swarm import local_swarm
from swarm.protocol import pb
from tests.e2e.chains import Logits, Script, differing, unsplit_logits
from tests.e2e.crowd import Answers, Leave, Neighbour, clients, company, compute

NEIGHBOURS = 15
PEERS = 3  # that the sixteen clients are
CONTEXT = 1280
SLOTS = f"{NEIGHBOURS + 3}x{CONTEXT}"  # a slot is free a moment after its session's end


@dataclass(frozen=True)
class Case:
    """``subject`` goes past 1,024 tokens of context; the others of the crowd take turns with ``neighbour``."""

    model: str
    spans: tuple[tuple[int, int], ...]
    subject: Script
    neighbour: Script

    def options(self) -> list[str]:
        return ["--slots", SLOTS, "--chunk-tokens", str(self.subject.chunk_tokens), "--threads", "1"]


def case(model: str, spans: tuple[tuple[int, int], ...], n_vocab: int, chunk: int, n_prompt: int, decoded: int) -> Case:
    neighbour = Script.random(n_vocab, 21, 5, 16, seed=2)
    return Case(model, spans, Script.random(n_vocab, n_prompt, decoded, chunk), neighbour)


QUICK = [
    pytest.param(case("smollm2_path", ((0, 15), (15, 30)), 49152, 256, 1026, 5), id="smollm2"),
    pytest.param(case("glm_random_ud_path", ((0, 2), (2, 10)), 260, 256, 1030, 8), id="glm-random"),  # top-k is 64
]
LONG = [
    pytest.param(case("smollm2_path", ((0, 10), (10, 20), (20, 30)), 49152, 64, 1100, 60), id="smollm2"),
    pytest.param(case("glm_tiny", ((0, 2), (2, 8)), 400, 64, 1100, 60), id="glm-tiny"),
    pytest.param(case("glm_random_ud_path", ((0, 1), (1, 6), (6, 10)), 260, 64, 1100, 60), id="glm-random"),
]


@pytest.mark.parametrize("case", QUICK)
async def test_one_among_fifteen(request: pytest.FixtureRequest, tmp_path: Path, case: Case) -> None:
    path: Path = request.getfixturevalue(case.model)
    expected = unsplit_logits(path, case.subject, context_tokens=CONTEXT, threads=2)
    of_neighbour = unsplit_logits(path, case.neighbour)
    with local_swarm(path, case.spans, tmp_path, case.options()) as swarm:
        async with clients(swarm.address, PEERS) as peers:
            crowd = _neighbours(peers, case.neighbour, of_neighbour)
            answers = await _in_company(peers[0], case.subject, crowd)
            assert differing(answers.rows, expected) == []
            _was_a_crowd(answers, case.subject, crowd)


def _neighbours(peers: list[SwarmClient], script: Script, expected: list[Logits]) -> list[Neighbour]:
    return [
        Neighbour(peers[number % PEERS], script, expected, CONTEXT, random.Random(number))
        for number in range(NEIGHBOURS)
    ]


async def _in_company(client: SwarmClient, script: Script, crowd: list[Neighbour]) -> Answers:
    answers = Answers()
    async with company(crowd), await client.open_session(CONTEXT) as session:
        await compute(session, script.requests, answers)
    return answers


def _was_a_crowd(answers: Answers, script: Script, crowd: list[Neighbour]) -> None:
    """Else the test has shown nothing."""
    left = sum((neighbour.left for neighbour in crowd), Counter[Leave]())
    assert all(left[leave] for leave in Leave), left
    assert sum(neighbour.compared for neighbour in crowd) > NEIGHBOURS
    assert answers.shared(pb.DECODE, script)
    assert len({row.tobytes() for row in answers.rows}) == len(script.requests)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG)
async def test_sixteen_at_once(request: pytest.FixtureRequest, tmp_path: Path, case: Case) -> None:
    """All go past 1,024 tokens, each alone first and then together, with neighbours that come and go."""
    path: Path = request.getfixturevalue(case.model)
    n_vocab = max(max(case.subject.prompt), 259) + 1
    chunk = case.subject.chunk_tokens
    scripts = [Script.random(n_vocab, 1025 + 3 * number, 12, chunk, seed=number) for number in range(4)]
    of_neighbour = unsplit_logits(path, case.neighbour)
    with local_swarm(path, case.spans, tmp_path, case.options()) as swarm:
        async with clients(swarm.address, PEERS) as peers:
            alone = [await _in_company(peers[0], script, []) for script in scripts]
            crowd = _neighbours(peers, case.neighbour, of_neighbour)[: NEIGHBOURS + 1 - len(scripts)]
            together = await _all_in_company(peers, scripts, crowd)
    for script, one, among in zip(scripts, alone, together, strict=True):
        assert differing(among.rows, one.rows) == []
        _was_a_crowd(among, script, crowd)
    assert differing(alone[0].rows, unsplit_logits(path, scripts[0], context_tokens=CONTEXT)) == []


async def _all_in_company(peers: list[SwarmClient], scripts: list[Script], crowd: list[Neighbour]) -> list[Answers]:
    runs = [
        _in_company(peers[number % PEERS], script, crowd if number == 0 else [])
        for number, script in enumerate(scripts)
    ]
    return await asyncio.gather(*runs)

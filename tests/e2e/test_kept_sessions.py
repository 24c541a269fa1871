"""Sessions that go on: forks, and answers that begin with what an answer before has computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm.client import ClientConfig, Generation, GenerationOptions, StepRequest, SwarmClient, WantedRow
from swarm.client.lasting import LastingSession
from swarm.errors import NodeFull, UsageError
from swarm.local_swarm import local_swarm
from swarm.protocol import pb
from tests.client.scripted import until
from tests.e2e.chains import Logits, Script, chain_logits, differing, unsplit_logits

PROMPT = tuple((7 * at + at * at) % 250 for at in range(150))
CHUNK = 64
OPTIONS = ["--chunk-tokens", str(CHUNK), "--memory", "1GiB"]


async def _decoded(session: LastingSession, start: int, tokens: tuple[int, ...]) -> list[Logits]:
    rows = []
    for position, token in enumerate(tokens, start):
        await session.step(StepRequest(position, (token,), pb.DECODE, WantedRow()))
        rows.append(await session.fetch_row(position))
    return rows


@pytest.mark.parametrize(
    ("model", "spans"), [("llama_untied_path", [(0, 2), (2, 6)]), ("glm_random_ud_path", [(0, 2), (2, 10)])]
)
async def test_forks_go_their_own_ways(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, spans: list[tuple[int, int]]
) -> None:
    path: Path = request.getfixturevalue(model)
    common, ours, theirs = (3, 4, 5), (6, 7), (200, 9, 10)
    end = len(PROMPT) + len(common)
    with local_swarm(path, spans, tmp_path, [*OPTIONS, "--slots", "1x256,1x512"]) as swarm:
        config = ClientConfig(cache_dir=tmp_path)
        async with SwarmClient.connect([swarm.address], config) as client, await client.open_session(256) as session:
            with pytest.raises(UsageError):
                await session.fetch_row(0)
            await chain_logits(session, Script(PROMPT, common, CHUNK))
            async with await client.fork(session) as fork:
                with pytest.raises(NodeFull):
                    await client.fork(session)
                rows = await _decoded(session, end, ours)
                other_rows = await _decoded(fork, end, theirs)
                rows += await _decoded(session, end + len(ours), ours)
                # a fork can go back to before it was one, into the middle of a chunk
                await fork.step(StepRequest(100, PROMPT[:20], pb.PREFILL, WantedRow()))
                assert fork.tokens == PROMPT[:100] + PROMPT[:20]
                assert session.tokens == PROMPT + common + ours + ours
    expected = unsplit_logits(path, Script(PROMPT, common + ours + ours, CHUNK))
    assert differing(rows, expected[-len(rows) :]) == []
    assert differing(other_rows, unsplit_logits(path, Script(PROMPT, common + theirs, CHUNK))[-len(theirs) :]) == []


async def _answer(client: SwarmClient, prompt: tuple[int, ...], n_tokens: int = 8) -> Generation:
    generation = await client.generate(prompt, GenerationOptions(max_tokens=n_tokens))
    await generation.finish()
    return generation


async def _stopped(client: SwarmClient, prompt: tuple[int, ...]) -> None:
    """An answer that is given up while a token is computed."""
    generation = await client.generate(prompt, GenerationOptions(max_tokens=100))
    answering = asyncio.create_task(generation.finish())
    await until(lambda: len(generation.progress.token_ids) >= 5)
    answering.cancel()
    await asyncio.wait([answering])


async def test_the_next_turn_computes_what_is_new(llama_untied_path: Path, tmp_path: Path) -> None:
    """One slot in each node: a conversation that begins with something else takes the place of the kept one."""
    with local_swarm(llama_untied_path, [(0, 3), (3, 6)], tmp_path, [*OPTIONS, "--slots", "1x512"]) as swarm:
        forgetful, keeping = ClientConfig(cache_dir=tmp_path), ClientConfig(cache_dir=tmp_path, keep_sessions=1)
        async with SwarmClient.connect([swarm.address], forgetful) as client:
            first = await _answer(client, PROMPT)
            turn = (*PROMPT, *first.progress.token_ids, 1, 2, 3)
            expected = [first.progress.token_ids, (await _answer(client, turn)).progress.token_ids]
        async with SwarmClient.connect([swarm.address], keeping) as client:
            one, two = await _answer(client, PROMPT), await _answer(client, turn)
            assert [one.progress.token_ids, two.progress.token_ids] == expected
            assert (one.progress.reused_tokens, two.progress.reused_tokens) == (0, len(turn) - 4), "all but the last"
            assert len(two.progress.prefill) == 1
            again = await _answer(client, PROMPT)
            assert again.progress.reused_tokens == len(PROMPT) - 1, "its last row is not kept"
            await _stopped(client, (*PROMPT, 9, 9))
            after = await _answer(client, turn)
            assert (after.progress.token_ids, after.progress.reused_tokens) == (expected[1], len(PROMPT))
            other = await _answer(client, PROMPT[1:])
            assert other.progress.reused_tokens == 0
        async with SwarmClient.connect([swarm.address], forgetful) as client:
            await _answer(client, PROMPT)  # nothing is left of the kept session

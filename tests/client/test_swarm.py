"""The client against real nodes: answers, limits, cancelling, and what it says when something is missing."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm import (
    ArtifactMismatch,
    ClientConfig,
    ClockSkew,
    ContextExceeded,
    Generation,
    GenerationOptions,
    NetworkError,
    NoPeersGiven,
    NoRoute,
    PeerFailed,
    SamplingParams,
    SessionLost,
    SwarmClient,
    Timeouts,
    UsageError,
)
from swarm.client.artifact_cache import Source
from swarm.client.info import InfoReader
from swarm.client.sampler import GREEDY
from swarm.ids import PeerId
from swarm.local_swarm import LocalSwarm, local_swarm
from tests.client.scripted import until

FRANCE = [{"role": "user", "content": "Name the capital of France."}]
STORY = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture
def config(cache_dir: Path) -> ClientConfig:
    return ClientConfig(cache_dir=cache_dir)


async def free_slots(client: SwarmClient) -> list[int]:
    """Asked of the nodes themselves: records are up to 20 s old."""
    reader = InfoReader(client._network, client.config.timeouts)
    records = (await client.snapshot()).records
    answers = [await reader.describe(Source(PeerId(record.peer_id), record.addresses)) for record in records]
    return [sum(slot.free for slot in answer.slots) for answer in answers]


async def all_slots_free(client: SwarmClient) -> None:
    while await free_slots(client) != [2, 2, 2]:  # noqa: ASYNC110 (the state is in other processes)
        await asyncio.sleep(0.02)


async def test_a_chain_of_three_answers(three_nodes: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([three_nodes.address], config) as client:
        generation = await client.chat(FRANCE, GenerationOptions(max_tokens=24))
        assert "Paris" in await generation.finish()
        assert [place.layers for place in generation.route] == [(0, 10), (10, 20), (20, 30)]
        assert len(generation.hops) == 3
        assert all(hop.compute.p50_ms > 0 for hop in generation.hops)
        assert generation.tokens_per_second > 0
        await all_slots_free(client)


async def test_a_second_client_takes_the_tokenizer_from_the_cache(
    three_nodes: LocalSwarm, config: ClientConfig, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    for _ in range(2):
        said.clear()
        async with SwarmClient.connect([three_nodes.address], config, on_status=said.append) as client:
            artifact = await client.artifact()
            assert artifact.encode("Hello", raw=True)
    assert not any("fetching" in line for line in said)


async def test_the_same_seed_draws_the_same_answer_alone_and_beside_others(
    three_nodes: LocalSwarm, config: ClientConfig
) -> None:
    options = GenerationOptions(max_tokens=16, sampling=SamplingParams(temperature=1.5, top_p=0.99, seed=11))
    async with SwarmClient.connect([three_nodes.address], config) as client:

        async def answer() -> Generation:
            generation = await client.chat(STORY, options)
            await generation.finish()
            return generation

        alone = await answer()
        together = await asyncio.gather(answer(), answer())
        assert [one.progress.token_ids for one in together] == [alone.progress.token_ids] * 2
        other = GenerationOptions(max_tokens=16, sampling=SamplingParams(temperature=1.5, top_p=0.99, seed=12))
        different = await client.chat(STORY, other)
        await different.finish()
        assert different.progress.token_ids != alone.progress.token_ids


async def test_a_flat_distribution_fetches_whole_rows(three_nodes: LocalSwarm, config: ClientConfig) -> None:
    options = GenerationOptions(max_tokens=8, sampling=SamplingParams(temperature=5.0, seed=1))
    async with SwarmClient.connect([three_nodes.address], config) as client:
        generation = await client.chat(STORY, options)
        await generation.finish()
        assert generation.progress.full_rows > 0
        assert len(generation.progress.token_ids) == 8


async def test_a_long_prompt_takes_several_chunks(three_nodes: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([three_nodes.address], config) as client:
        session = await client.open_session(512)
        size = session.terms.chunk_tokens
        await session.close()
        prompt = list(range(100, 100 + min(size + 7, 500)))
        generation = await client.generate(prompt, GenerationOptions(max_tokens=2))
        await generation.finish()
        assert sum(step.n_tokens for step in generation.progress.prefill) == len(prompt)
        assert all(step.n_tokens <= size for step in generation.progress.prefill)


async def test_cancelling_an_answer_frees_every_slot(three_nodes: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([three_nodes.address], config) as client:
        generation = await client.chat(STORY, GenerationOptions(sampling=GREEDY))
        answering = asyncio.create_task(generation.finish())
        await until(lambda: len(generation.progress.token_ids) > 2)
        assert await free_slots(client) == [1, 1, 1]
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await all_slots_free(client)


async def test_leaving_the_client_frees_what_is_open(three_nodes: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([three_nodes.address], config) as client:
        await client.open_session(512)
        assert await free_slots(client) == [1, 1, 1]
    async with SwarmClient.connect([three_nodes.address], config) as client:
        await all_slots_free(client)


async def test_full_nodes_end_in_one_line(three_nodes: LocalSwarm, cache_dir: Path) -> None:
    config = ClientConfig(cache_dir=cache_dir, timeouts=Timeouts(route_seconds=0.5))
    async with SwarmClient.connect([three_nodes.address], config) as client:
        async with await client.open_session(512), await client.open_session(512):
            with pytest.raises((NoRoute, PeerFailed), match=r"slot|is full"):
                await client.open_session(512)
        await all_slots_free(client)


async def test_a_prompt_beyond_the_context_is_refused_with_numbers(
    three_nodes: LocalSwarm, config: ClientConfig
) -> None:
    async with SwarmClient.connect([three_nodes.address], config) as client:
        generation = await client.generate([5] * 600, GenerationOptions(max_tokens=10))
        with pytest.raises(ContextExceeded, match=r"prompt of 600 tokens and 10 .* context of 512 tokens; shorten"):
            await generation.finish()


async def test_a_model_that_nobody_serves(three_nodes: LocalSwarm, cache_dir: Path) -> None:
    config = ClientConfig(cache_dir=cache_dir, timeouts=Timeouts(route_seconds=0))
    async with SwarmClient.connect([three_nodes.address], config) as client:
        (entry,) = await client.artifacts()
        with pytest.raises(ArtifactMismatch, match=rf"does not serve other but .*{entry.artifact_id[:12]}.*--model"):
            await client.artifact("other")
        assert (await client.artifact(entry.artifact_id[:8])).id == entry.artifact_id
        assert (await client.artifact(entry.name.upper())).id == entry.artifact_id


async def test_a_token_outside_the_vocabulary_is_refused(three_nodes: LocalSwarm, config: ClientConfig) -> None:
    async with SwarmClient.connect([three_nodes.address], config) as client:
        with pytest.raises(UsageError, match="token 49152 is outside the vocabulary"):
            await client.generate([1, 49152])


async def test_missing_layers_end_in_the_command_that_fills_them(half_a_swarm: LocalSwarm, cache_dir: Path) -> None:
    config = ClientConfig(cache_dir=cache_dir, timeouts=Timeouts(route_seconds=0.5))
    said: list[str] = []
    async with SwarmClient.connect([half_a_swarm.address], config, on_status=said.append) as client:
        generation = await client.generate("hello", GenerationOptions(max_tokens=4))
        with pytest.raises(NoRoute, match=r"swarm-node --model PATH --layers 3:6 --initial-peers /ip4") as caught:
            await generation.finish()
    assert caught.value.missing == ((3, 6),)
    assert any("waiting" in line for line in said)


async def test_a_clock_that_is_off_is_named(half_a_swarm: LocalSwarm) -> None:
    config = ClientConfig(clock=lambda: time.time() + 60)
    with pytest.raises(ClockSkew, match=r"this clock is .* s ahead"):
        async with SwarmClient.connect([half_a_swarm.address], config):
            pass


async def test_an_unreachable_initial_peer(half_a_swarm: LocalSwarm) -> None:
    address = re.sub(r"/tcp/\d+/", "/tcp/1/", half_a_swarm.address)
    with pytest.raises(NetworkError, match=r"no initial peer answered .*; check"):
        async with SwarmClient.connect([address]):
            pass


async def test_no_peers_and_wrong_addresses() -> None:
    with pytest.raises(NoPeersGiven, match=r"--initial-peers .* --new-swarm"):
        async with SwarmClient.connect([]):
            pass
    with pytest.raises(UsageError, match="is not the address of a peer"):
        async with SwarmClient.connect(["localhost:4000"]):
            pass


@pytest.fixture
def two_nodes(smollm2_path: Path, tmp_path: Path) -> Iterator[LocalSwarm]:
    with local_swarm(smollm2_path, [(0, 20), (20, 30)], tmp_path, ["--threads", "1"]) as swarm:
        yield swarm


async def test_a_hop_that_stops_or_dies_is_named_with_its_layers(two_nodes: LocalSwarm, cache_dir: Path) -> None:
    """Nobody else serves its layers: after a while the session is lost."""
    last = two_nodes.nodes[1].process
    timeouts = Timeouts(
        heartbeat_interval_seconds=0.2,
        heartbeat_seconds=1,
        connect_seconds=2,
        route_seconds=0.5,
        recover_seconds=0.5,
    )
    async with SwarmClient.connect([two_nodes.address], ClientConfig(cache_dir=cache_dir, timeouts=timeouts)) as client:
        for number, cause in ((signal.SIGSTOP, "has been silent"), (signal.SIGKILL, "")):
            generation = await client.chat(STORY, GenerationOptions(sampling=GREEDY))
            answering = asyncio.create_task(generation.finish())
            await until(lambda: len(generation.progress.token_ids) > 2)  # noqa: B023
            last.send_signal(number)
            with pytest.raises(SessionLost, match=rf"lost at position \d+ .*layers 20:30\) .*{cause}.*; \w+") as caught:
                await answering
            assert generation.route[1].peer_id in str(caught.value)
            last.send_signal(signal.SIGCONT)
        generation = await client.chat(STORY)
        with pytest.raises((PeerFailed, NoRoute), match="20:30"):
            await generation.finish()

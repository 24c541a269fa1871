"""One answer over scripted hops: chunks, choices, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from swarm.client.chain import ChainSession
from swarm.client.config import Timeouts
from swarm.client.generate import Generation, GenerationOptions, Vocabulary
from swarm.client.progress import StopReason
from swarm.client.reply import Answer, Reply, ReplyEvent, ReplyFormat, ReplyParser, Thinking
from swarm.client.sampler import GREEDY, SamplingParams
from swarm.errors import ContextExceeded, PeerFailed, SessionLost, UsageError
from swarm.protocol import pb
from tests.client.scripted import TERMS, ScriptedHop, ScriptedNetwork, row_of, until
from tests.client.test_sampler import plain_choice

STOP = 500
PIECES = {11: b"Hel", 12: b"lo <en", 13: b"d> more", 14: "€".encode()[:1], 15: "€".encode()[1:], 16: b"!"}
VOCABULARY = Vocabulary(piece=lambda token: PIECES.get(token, b"x"), stop_tokens=frozenset({STOP}))


@asynccontextmanager
async def answering(
    prompt: list[int],
    options: GenerationOptions,
    hop: ScriptedHop | None = None,
    context_tokens: int = 1000,
    failures: list[PeerFailed] | None = None,
    thinker: Vocabulary | None = None,
) -> AsyncIterator[tuple[Generation, ScriptedNetwork]]:
    network = ScriptedNetwork([hop or ScriptedHop()])
    terms = replace(TERMS, context_tokens=context_tokens)

    async def open_session() -> ChainSession:
        return await ChainSession.open(network, network.places, terms, Timeouts())

    note = [] if failures is None else failures
    try:
        parser = ReplyParser(ReplyFormat(thinking=True, tool_calls=True), thinking=True) if thinker else None
        yield Generation(prompt, options, thinker or VOCABULARY, open_session, note.append, parser), network
    finally:
        await network.close()


async def test_greedy_tokens_until_the_limit() -> None:
    async with answering([1, 2, 10], GenerationOptions(max_tokens=4)) as (generation, network):
        tokens = [token async for token in generation]
        assert [token.id for token in tokens] == [11, 12, 13, 14] == generation.progress.token_ids
        assert [token.position for token in tokens] == [3, 4, 5, 6]
        assert "".join(token.text for token in tokens) == "Hello <end> more�" == generation.progress.text
        assert generation.progress.stop_reason is StopReason.MAX_TOKENS
        assert all(token.log_probability < 0 for token in tokens)
        await network.idle()
        steps = network.hops[0].steps
        assert [(step.start, list(step.tokens), step.kind) for step in steps] == [
            (0, [1, 2, 10], pb.PREFILL),
            (3, [11], pb.DECODE),
            (4, [12], pb.DECODE),
            (5, [13], pb.DECODE),
        ]
        timing = generation.progress.timing
        assert timing.first_token_seconds is not None
        assert generation.tokens_per_second > 0
        assert [hop.layers for hop in generation.hops] == [(0, 10)]


THINKER = replace(VOCABULARY, piece=lambda token: {11: b"a </th", 12: b"ink>b", 13: b"<tool_call>f"}.get(token, b"."))


async def test_tokens_carry_what_became_certain_of_the_reply() -> None:
    async with answering([1, 2, 10], GenerationOptions(max_tokens=3), thinker=THINKER) as (generation, _):
        events = [token.events async for token in generation]
    # A call that is still open at the end is text.
    assert events == [(Thinking("a "),), (Answer("b"),), (Answer("<tool_call>"), Answer("f"))]
    assert generation.progress.text == "a </think>b<tool_call>f"
    assert generation.progress.reply == Reply("a ", "b<tool_call>f")


async def test_a_reply_that_is_broken_off_keeps_what_was_held_back() -> None:
    async with answering([1, 2, 10], GenerationOptions(max_tokens=3), thinker=THINKER) as (generation, _), generation:
        await anext(generation)
    assert generation.progress.reply == Reply("a </th", thinking_unfinished=True)


async def test_slots_are_free_before_the_rest_of_the_text_is_parsed() -> None:
    async with answering([1, 2, 10], GenerationOptions(max_tokens=3), thinker=THINKER) as (generation, network):
        session: list[ChainSession] = []
        closed: list[bool] = []

        class Watching(ReplyParser):
            def finish(self) -> tuple[ReplyEvent, ...]:
                closed.append(session[0].failure is not None)  # what a closed session says to its users
                return super().finish()

        async def open_session() -> ChainSession:
            session.append(await ChainSession.open(network, network.places, TERMS, Timeouts()))
            return session[0]

        watched = Generation([1, 2, 10], generation.options, THINKER, open_session, parser=Watching())
        async with watched:
            await anext(watched)
    assert closed == [True]


async def test_without_marks_the_reply_is_the_text() -> None:
    async with answering([1, 2, 10], GenerationOptions(max_tokens=4)) as (generation, _):
        events = [event async for event in generation.events()]
    assert "".join(event.text for event in events) == generation.progress.text == generation.progress.reply.answer
    assert all(isinstance(event, Answer) for event in events)


async def test_a_long_prompt_goes_out_in_chunks_that_do_not_wait_for_answers() -> None:
    held: list[pb.Step] = []
    most = 0

    def hold(_hop: ScriptedHop, step: pb.Step) -> bool:
        nonlocal most
        held.append(step)
        most = max(most, len(held))
        return True

    async with answering(list(range(60)), GenerationOptions(max_tokens=1), ScriptedHop(on_step=hold)) as (gen, network):
        finishing = asyncio.create_task(gen.finish())
        await until(lambda: len(held) == 4)
        while not finishing.done():
            if held:
                await network.hops[0].answer(held.pop(0))
            await asyncio.sleep(0.001)
        await finishing
    steps = network.hops[0].steps
    assert [(step.start, step.n_tokens) for step in steps] == [(at, 8) for at in range(0, 56, 8)] + [(56, 4)]
    assert [step.output.last_row for step in steps] == [False] * 7 + [True]
    assert most == 4
    assert len(gen.progress.prefill) == 8


async def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    async with answering([STOP - 2], GenerationOptions()) as (generation, _):
        tokens = [token async for token in generation]
        assert [(token.id, token.is_stop, token.text) for token in tokens] == [(STOP - 1, False, "x"), (STOP, True, "")]
        assert generation.progress.token_ids == [STOP - 1]
        assert generation.progress.stop_reason is StopReason.STOP_TOKEN


async def test_a_stop_string_across_tokens_is_never_shown() -> None:
    async with answering([10], GenerationOptions(stop=("<end>",), max_tokens=9)) as (generation, _):
        texts = [token.text async for token in generation]
        assert texts == ["Hel", "lo ", ""]
        assert generation.progress.stop_reason is StopReason.STOP_STRING
        assert generation.progress.stop_string == "<end>"


async def test_a_possible_stop_string_is_shown_once_it_is_none() -> None:
    async with answering([10], GenerationOptions(stop=("<endless>",), max_tokens=3)) as (generation, _):
        assert [token.text async for token in generation] == ["Hel", "lo ", "<end> more"]


async def test_a_character_in_two_tokens_comes_whole() -> None:
    async with answering([13], GenerationOptions(max_tokens=3)) as (generation, _):
        assert [token.text async for token in generation] == ["", "€", "!"]


async def test_a_full_context_ends_the_answer() -> None:
    async with answering([1, 2, 3], GenerationOptions(), context_tokens=5) as (generation, network):
        assert await generation.finish() == "xxx"
        assert generation.progress.stop_reason is StopReason.CONTEXT_FULL
        assert max(step.start + step.n_tokens for step in network.hops[0].steps) == 5


async def test_a_prompt_beyond_the_context_is_refused_before_anything_is_sent() -> None:
    async with answering([1] * 10, GenerationOptions(max_tokens=5), context_tokens=14) as (generation, network):
        with pytest.raises(
            ContextExceeded, match=r"prompt of 10 tokens and 5 tokens of answer exceeds .* 14 tokens; sho"
        ):
            await generation.finish()
        await network.idle()
        assert not network.hops[0].steps


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=3.0, seed=5),
        SamplingParams(temperature=1.0, top_p=0.9, seed=6),
        SamplingParams(temperature=1.5, repeat_penalty=1.3, presence_penalty=0.5, seed=7, penalty_window=8),
    ],
)
async def test_sampled_tokens_are_those_of_the_whole_rows(sampling: SamplingParams) -> None:
    prompt = [3, 4, 5]
    vocabulary = Vocabulary(piece=lambda _: b"x", stop_tokens=frozenset())
    async with answering(prompt, GenerationOptions(max_tokens=25, sampling=sampling)) as (generation, _):
        generation._vocabulary = vocabulary
        await generation.finish()
    history = list(prompt)
    for _ in range(25):
        row = row_of(history[-1], len(history) - 1)
        assert sampling.seed is not None
        history.append(plain_choice(row, sampling, history, sampling.seed, len(history)))
    assert generation.progress.token_ids == history[3:]
    if sampling.temperature == 3.0:
        assert generation.progress.full_rows > 0


async def test_an_answer_without_a_seed_tells_the_one_it_drew() -> None:
    options = GenerationOptions(max_tokens=8, sampling=SamplingParams(temperature=2.0))
    async with answering([7], options) as (first, _):
        await first.finish()
    again = replace(options, sampling=replace(options.sampling, seed=first.seed))
    async with answering([7], again) as (second, _):
        await second.finish()
    assert first.progress.token_ids == second.progress.token_ids


async def test_leaving_early_frees_the_session() -> None:
    async with answering([1], GenerationOptions()) as (generation, network):
        async with generation:
            async for _ in generation:
                break
        await network.idle()
        assert network.hops[0].sessions == 0


async def test_a_time_limit_ends_the_answer() -> None:
    hop = ScriptedHop(answers_steps=False)
    async with answering([1], GenerationOptions(deadline_seconds=0.2), hop) as (generation, network):
        with pytest.raises(SessionLost, match=r"not finished within 0.2 s; allow more with --timeout"):
            await generation.finish()
        await network.idle()


async def test_a_failure_mid_answer_is_raised_and_reported() -> None:
    def die_later(hop: ScriptedHop, step: pb.Step) -> bool:
        if step.step < 3:
            return False
        assert hop.control is not None
        hop.control._writer.transport.abort()
        return True

    failures: list[PeerFailed] = []
    hop = ScriptedHop(on_step=die_later)
    async with answering([1], GenerationOptions(), hop, failures=failures) as (generation, _):
        with pytest.raises(PeerFailed, match=r"peer0 \(layers 0:10\) closed the connection"):
            await generation.finish()
        assert [error.peer for error in failures] == ["peer0"]
        assert generation.progress.token_ids == [2, 3]


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"deadline_seconds": 0}, {"stop": ("",)}])
async def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="; give "):
        GenerationOptions(**wrong)  # type: ignore[arg-type]


async def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        async with answering([], GenerationOptions(sampling=GREEDY)):
            pass

"""One answer: the prompt goes out in chunks, then token by token until something ends it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from shim.types import RowSummary
from swarm.client.context import check_context, shared_tokens
from swarm.client.hop import HopPlace
from swarm.client.progress import Progress, StopReason, Token
from swarm.client.reply import ReplyEvent, ReplyParser
from swarm.client.sampler import GREEDY, KnownLogits, Sampler, SamplingParams, log_probability
from swarm.client.steps import StepAnswer, StepRequest, StepSession, WantedRow
from swarm.client.stops import StopStrings
from swarm.client.trace import HopSummary, summarise
from swarm.client.utf8 import Utf8Stream
from swarm.errors import PeerFailed, SessionLost, UsageError
from swarm.protocol import pb

OpenSession = Callable[[], Awaitable[StepSession]]
LeaveSession = Callable[[StepSession], Awaitable[None]]


@dataclass(frozen=True)
class GenerationOptions:
    """``max_tokens`` None: until the model stops or the context is full. ``deadline_seconds`` bounds all of it."""

    max_tokens: int | None = None
    sampling: SamplingParams = GREEDY
    stop: tuple[str, ...] = ()
    prefill_window: int = 4
    deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}; give 1 or more")
        if self.deadline_seconds is not None and self.deadline_seconds <= 0:
            raise UsageError(f"the time limit is {self.deadline_seconds:g} s; give more than 0")
        StopStrings(self.stop)  # refuses what can't be one


@dataclass(frozen=True)
class Vocabulary:
    """What an answer needs of the tokenizer."""

    piece: Callable[[int], bytes]
    stop_tokens: frozenset[int]


class Generation:
    """An answer on its way: iterate to get its tokens.

    The session is opened by the first token asked for and left by the end of the iteration, by ``aclose``, or by
    leaving the ``async with`` block; ``leave_session`` says what becomes of it (None: it is closed). Cancelling the
    task that waits for a token frees the slots on every hop, too.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        vocabulary: Vocabulary,
        open_session: OpenSession,
        on_peer_failed: Callable[[PeerFailed], None] = lambda _: None,
        parser: ReplyParser | None = None,
        leave_session: LeaveSession | None = None,
    ) -> None:
        if not prompt:
            raise UsageError("the prompt is empty; give some text")
        self.prompt = tuple(prompt)
        self.options = options
        seed = options.sampling.seed
        self.seed = secrets.randbits(53) if seed is None else seed
        self._parser = parser or ReplyParser()
        self.progress = Progress(reply=self._parser.reply)
        self.route: tuple[HopPlace, ...] = ()
        self.context_tokens = 0
        self._vocabulary = vocabulary
        self._open_session = open_session
        self._leave_session = leave_session or _close
        self._on_peer_failed = on_peer_failed
        self._recovered_before = 0  # in an answer before
        self._sampler = Sampler(options.sampling, self.seed)
        self._tokens = self._run()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Token:
        return await anext(self._tokens)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._tokens.aclose()

    async def finish(self) -> str:
        """Runs to the end and returns the answer, without thinking; ``progress`` has everything."""
        async for _ in self:
            pass
        return self.progress.reply.answer

    async def events(self) -> AsyncIterator[ReplyEvent]:
        """The answer as ``Thinking``, ``Answer`` and ``ToolCall``, instead of the tokens."""
        async for token in self:
            for event in token.events:
                yield event

    @property
    def hops(self) -> tuple[HopSummary, ...]:
        """Timings per hop over the decode steps; over the prefill when there was none."""
        return summarise(self.progress.decode or self.progress.prefill)

    @property
    def tokens_per_second(self) -> float:
        """Of the decode: the first token, which waits for the prefill, is left out."""
        timing = self.progress.timing
        steps = len(self.progress.decode)
        if not steps or timing.first_token is None or timing.last_token is None:
            return 0.0
        return steps / max(timing.last_token - timing.first_token, 1e-9)

    async def _run(self) -> AsyncGenerator[Token, None]:
        self.progress.timing.started = time.monotonic()
        clock = _Deadline(self.options.deadline_seconds)
        async with clock.limit():
            session = await self._open_session()
        try:
            self._begin(session)
            async for token in self._answer(session, clock):
                yield token
        except PeerFailed as error:
            self._on_peer_failed(error)
            raise
        finally:
            try:
                await self._leave_session(session)  # first: nobody's slot waits for the rest of the text
            finally:
                self._parser.finish()

    def _begin(self, session: StepSession) -> None:
        self.route = session.places
        self.context_tokens = session.terms.context_tokens
        self.progress.numerics_ids = session.numerics_ids
        self._recovered_before = len(session.recoveries)
        # the last token's row is needed, whoever has computed it before
        self.progress.reused_tokens = min(shared_tokens(session.tokens, self.prompt), len(self.prompt) - 1)
        check_context(len(self.prompt), self.options.max_tokens, self.context_tokens)

    async def _answer(self, session: StepSession, clock: _Deadline) -> AsyncIterator[Token]:
        history = list(self.prompt)
        writer = _Writer(self._vocabulary, self.options.stop, self.progress)
        async with clock.limit():
            answer = await self._prefill(session)
        while True:
            async with clock.limit():
                drawn = await self._draw(session, answer, history)
            self._note_token()
            reason = self._end(drawn, len(history), session)
            text, reason = writer.write(drawn.id, reason)
            token = Token(
                id=drawn.id,
                text=text,
                position=len(history),
                log_probability=drawn.log_probability,
                is_stop=reason is StopReason.STOP_TOKEN,
                trace=answer.trace,
                events=self._take_apart(text, reason),
            )
            self.progress.stop_reason = reason
            yield token
            if reason is not None:
                return
            async with clock.limit():
                answer = await self._decode(session, len(history), drawn.id, history)
            history.append(drawn.id)

    def _take_apart(self, text: str, reason: StopReason | None) -> tuple[ReplyEvent, ...]:
        events = self._parser.feed(text)
        return events if reason is None else (*events, *self._parser.finish())

    async def _prefill(self, session: StepSession) -> StepAnswer:
        """Sends the chunks ahead of their answers, so that every hop has work; only the last one asks for logits."""
        in_flight: deque[int] = deque()
        size = session.terms.chunk_tokens
        answer: StepAnswer | None = None
        for start in range(self.progress.reused_tokens, len(self.prompt), size):
            if len(in_flight) >= self.options.prefill_window:
                self._note_prefill(await session.answer(in_flight.popleft()))
            chunk = self.prompt[start : start + size]
            row = self._wanted(self.prompt) if start + size >= len(self.prompt) else None
            in_flight.append(await session.send(StepRequest(start, chunk, pb.PREFILL, row)))
        while in_flight:
            answer = self._note_prefill(await session.answer(in_flight.popleft()))
        assert answer is not None
        self._note_recoveries(session)
        return answer

    async def _decode(self, session: StepSession, position: int, token: int, history: Sequence[int]) -> StepAnswer:
        row = self._wanted([*history[-self.options.sampling.penalty_window :], token])
        answer = await session.step(StepRequest(position, (token,), pb.DECODE, row))
        self.progress.decode.append(answer.trace)
        self._note_recoveries(session)
        return answer

    def _wanted(self, history: Sequence[int]) -> WantedRow:
        return WantedRow(self.options.sampling.wire_temperature, self._sampler.ids_to_ask(history))

    async def _draw(self, session: StepSession, answer: StepAnswer, history: Sequence[int]) -> _Drawn:
        """The next token; takes the whole row when the top logits can't tell."""
        row = answer.row
        assert row is not None
        asked = self._sampler.ids_to_ask(history)
        position = len(history)
        known = KnownLogits.of_summary(row, asked, session.terms.n_vocab)
        token = self._sampler.choose(known, history, position)
        if token is None:
            self.progress.full_rows += 1
            known = KnownLogits.of_row(await session.fetch_row(position - 1))
            token = self._sampler.choose(known, history, position)
        assert token is not None
        return _Drawn(token, _log_probability(row, known, token, self.options.sampling))

    def _end(self, drawn: _Drawn, position: int, session: StepSession) -> StopReason | None:
        if drawn.id in self._vocabulary.stop_tokens:
            return StopReason.STOP_TOKEN
        if len(self.progress.token_ids) + 1 == self.options.max_tokens:
            return StopReason.MAX_TOKENS
        # The token at the last position can be shown, but nothing can be computed from it.
        return StopReason.CONTEXT_FULL if position >= session.terms.context_tokens else None

    def _note_prefill(self, answer: StepAnswer) -> StepAnswer:
        self.progress.prefill.append(answer.trace)
        return answer

    def _note_recoveries(self, session: StepSession) -> None:
        known = self._recovered_before + len(self.progress.recoveries)
        if len(session.recoveries) > known:
            self.progress.recoveries += session.recoveries[known:]
            self.route = session.places
            fresh = [found for found in session.numerics_ids if found not in self.progress.numerics_ids]
            self.progress.numerics_ids += tuple(fresh)

    def _note_token(self) -> None:
        timing = self.progress.timing
        timing.last_token = time.monotonic()
        timing.first_token = timing.first_token or timing.last_token


@dataclass(frozen=True)
class _Drawn:
    id: int
    log_probability: float


class _Writer:
    """Tokens to text: unfinished characters and possible stop strings are held back."""

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str], progress: Progress) -> None:
        self._vocabulary = vocabulary
        self._utf8 = Utf8Stream()
        self._stops = StopStrings(stop)
        self._progress = progress

    def write(self, token: int, reason: StopReason | None) -> tuple[str, StopReason | None]:
        """The text that is certain now, and why the answer ends: a stop string may be the earlier reason."""
        data = b""
        if reason is not StopReason.STOP_TOKEN:
            self._progress.token_ids.append(token)
            data = self._vocabulary.piece(token)
        fresh = self._utf8.feed(data) + (self._utf8.flush() if reason else "")
        fed = self._stops.feed(fresh)
        text = fed.text
        if fed.stop is not None:
            self._progress.stop_string = fed.stop
            reason = StopReason.STOP_STRING
        elif reason is not None:
            text += self._stops.flush()
        self._progress.text += text
        return text, reason


class _Deadline:
    """A limit over the whole answer, put around each wait: a timeout may not span a ``yield``."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else asyncio.get_running_loop().time() + seconds

    def limit(self) -> _Limit:
        return _Limit(self._end, self._seconds)


class _Limit:
    def __init__(self, end: float | None, seconds: float | None) -> None:
        self._timeout = asyncio.timeout_at(end)
        self._seconds = seconds

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._timeout.__aexit__(*exc)  # type: ignore[arg-type]
        except TimeoutError as error:
            raise SessionLost(
                f"the answer was not finished within {self._seconds:g} s; allow more with --timeout"
            ) from error


async def _close(session: StepSession) -> None:
    await session.close()


def _log_probability(row: RowSummary, known: KnownLogits, token: int, params: SamplingParams) -> float:
    logit = float(known.logits[(known.ids == token).argmax()])
    return log_probability(row, logit, params.wire_temperature)

"""What a model writes, taken apart while it comes: thinking, answer, tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.client.stops import overlap
from swarm.client.tool_calls import CALL, KEY, Malformed, Reading, ToolCall, ToolCalls

THINK = "<think>"
END_THINK = "</think>"
MAX_CALL_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Thinking:
    """A piece of reasoning; ``text`` is never empty."""

    text: str


@dataclass(frozen=True)
class Answer:
    """A piece of the answer; ``text`` is never empty."""

    text: str


ReplyEvent = Thinking | Answer | ToolCall


@dataclass(frozen=True)
class ReplyFormat:
    """Which marks a model has. Where it has none, everything is answer."""

    thinking: bool = False  # <think> and </think>
    tool_calls: bool = False  # <tool_call>, with <arg_key> inside

    @classmethod
    def of(cls, template: str, tokens: frozenset[str]) -> ReplyFormat:
        """A model has the marks that its template writes or that are tokens of their own, as ``tokens`` says."""
        return cls(
            thinking=END_THINK in template or END_THINK in tokens,
            tool_calls=KEY in template or KEY in tokens,
        )

    @property
    def marks(self) -> tuple[str, ...]:
        return (*((THINK, END_THINK) if self.thinking else ()), *((CALL,) if self.tool_calls else ()))


PLAIN = ReplyFormat()
MARKS = (END_THINK, KEY)  # those that tell


@dataclass
class Reply:
    """Everything so far."""

    thinking: str = ""
    answer: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    thinking_unfinished: bool = False  # the text ended while the model was thinking

    def message(self) -> dict[str, Any]:
        """As the conversation keeps it: reasoning and calls apart from the content, as templates read them."""
        message: dict[str, Any] = {"role": "assistant", "content": self.answer}
        # Said even when empty, where a template would take what stands before the mark for reasoning.
        if self.thinking or END_THINK in self.answer:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class ReplyParser:
    """Takes text in pieces and gives events; how the text is split does not matter, but for the size of the events.

    Texts are exact: no white space is added or taken away, and only what works as a mark goes. ``<think>`` does at the
    beginning of the reply and after a call, ``</think>`` also at the end of thinking; anywhere else they are words of a
    model that talks about them. A call may stand inside open thinking, which then goes on. One that is malformed or
    unfinished stays text, and so does one that has not ended after ``max_call`` characters: no more than that is held.
    The time is linear in the text. ``thinking`` says that the prompt ended with an open ``<think>``.
    """

    def __init__(
        self,
        form: ReplyFormat = PLAIN,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        max_call: int = MAX_CALL_CHARACTERS,
    ) -> None:
        self.reply = Reply()
        self._marks = form.marks
        self._mark = re.compile("|".join(map(re.escape, self._marks)) or r"(?!)")
        self._calls = ToolCalls(tools)
        self._thinking = thinking and form.thinking
        self._blank = True  # nothing but white space since thinking, answer or call
        self._called = False  # nothing but white space since a call
        self._max_call = max_call
        self._held = ""
        self._at = 0  # what comes before is decided
        self._reading: Reading | None = None  # of the call that begins there
        # What begins before this place must be a call by then, or is none. It belongs to the outermost call: those
        # inside it get no more time when it is over, or each would be read to an end of its own.
        self._limit = 0
        self._limit_reached = False

    def feed(self, text: str) -> tuple[ReplyEvent, ...]:
        """What has become certain."""
        # A string that only one name knows grows in place.
        held, self._held = self._held, ""
        held += text
        self._held = held
        del held
        return self._certain(final=False)

    def finish(self) -> tuple[ReplyEvent, ...]:
        """The rest, after the last piece. Safe to call again."""
        events = self._certain(final=True)
        # After a call the model waits for its result: it was not cut off.
        self.reply.thinking_unfinished = self._thinking and not self._called
        return events

    def _certain(self, *, final: bool) -> tuple[ReplyEvent, ...]:
        events = tuple(self._events(final=final))
        self._calls.forget()
        if self._reading is not None:
            self._reading.shift(self._at, self._calls)
        if self._at:
            self._held = self._held[self._at :]
            self._limit -= self._at
            self._at = 0
        return events

    def _events(self, *, final: bool) -> Iterator[ReplyEvent]:
        while self._at < len(self._held):
            found = self._mark.search(self._held, self._at)
            if found is None:
                beginning = 0 if final else max((overlap(self._held, mark) for mark in self._marks), default=0)
                sure = len(self._held) - self._at - beginning
                if sure > 0:
                    yield self._text(sure)
                return
            if found.start() > self._at:
                yield self._text(found.start() - self._at)
            elif found[0] != CALL:
                yield from self._think(found[0])
            else:
                try:
                    call = self._read(final=final)
                except Malformed:
                    yield self._text(len(CALL))
                    continue
                if call is None:
                    return
                yield self._call(call)

    def _read(self, *, final: bool) -> ToolCall | None:
        """The call that begins here; None while it may still become one. Raises ``Malformed``."""
        if self._reading is None:
            if self._at + len(CALL) > self._limit:
                self._limit, self._limit_reached = self._at + self._max_call, False
            self._reading = self._calls.reading(self._at)
        reading, self._reading = self._reading, None
        end = min(len(self._held), self._limit)
        try:
            call = reading.go(self._held, end)
        except Malformed:
            self._decided()
            raise
        if call is not None:
            self._decided()
            return call
        if final or end == self._limit:
            self._limit_reached = True
            reading.fail()
            raise Malformed
        self._reading = reading
        return None

    def _decided(self) -> None:
        if not self._limit_reached:
            self._limit = 0

    def _think(self, mark: str) -> Iterator[ReplyEvent]:
        closes = mark == END_THINK and self._thinking
        if not closes and not self._blank:
            yield self._text(len(mark))
            return
        self._thinking = mark == THINK
        self._blank, self._called = True, False
        self._take(len(mark))

    def _text(self, size: int) -> Thinking | Answer:
        text = self._take(size)
        self._blank = self._blank and text.isspace()
        self._called = self._called and self._blank
        if self._thinking:
            self.reply.thinking += text
            return Thinking(text)
        self.reply.answer += text
        return Answer(text)

    def _call(self, call: ToolCall) -> ToolCall:
        self._take(len(call.text))
        self._blank = self._called = True
        self.reply.tool_calls.append(call)
        return call

    def _take(self, size: int) -> str:
        start, self._at = self._at, self._at + size
        return self._held[start : self._at]

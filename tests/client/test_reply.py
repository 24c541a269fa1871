"""A model's text taken apart: thinking, answer and tool calls, whatever the pieces it comes in."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.reply import PLAIN, Answer, Reply, ReplyEvent, ReplyFormat, ReplyParser, Thinking
from swarm.client.tool_calls import ToolCall
from swarm.errors import UsageError

GLM = ReplyFormat(thinking=True, tool_calls=True)
TIME = "<tool_call>time</tool_call>"
WEATHER = "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"


def T(text: str) -> Thinking:  # noqa: N802 (the tables read better)
    return Thinking(text)


def A(text: str) -> Answer:  # noqa: N802
    return Answer(text)


def C(written: str, name: str, **arguments: Any) -> ToolCall:  # noqa: N802
    return ToolCall(name, arguments, written)


def take_apart(
    pieces: Iterable[str], form: ReplyFormat = GLM, *, thinking: bool = True, tools: Sequence[dict[str, Any]] = ()
) -> tuple[list[ReplyEvent], Reply]:
    """The events, neighbours of one kind joined."""
    parser = ReplyParser(form, thinking=thinking, tools=tools)
    events: list[ReplyEvent] = []
    for event in [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]:
        last = events[-1] if events else None
        if isinstance(event, Thinking) and isinstance(last, Thinking):
            events[-1] = Thinking(last.text + event.text)
        elif isinstance(event, Answer) and isinstance(last, Answer):
            events[-1] = Answer(last.text + event.text)
        else:
            events.append(event)
    return events, parser.reply


CASES: dict[str, tuple[str, list[ReplyEvent]]] = {
    "thinking and answer": ("The capital is Paris.</think>Paris", [T("The capital is Paris."), A("Paris")]),
    "white space stays": (" a\n</think>\n\nb ", [T(" a\n"), A("\n\nb ")]),
    "no thinking at all": ("</think>Paris", [A("Paris")]),
    "nothing": ("", []),
    "an answer that never comes": ("Let me see, 12 times", [T("Let me see, 12 times")]),
    "thinking opened twice": ("<think>a</think>b", [T("a"), A("b")]),
    "closed twice": ("a</think>\n</think>b", [T("a"), A("\nb")]),
    "opened again before the answer": ("a</think><think>b</think>c", [T("ab"), A("c")]),
    "thinking about marks": ("the <think> mark</think>x", [T("the <think> mark"), A("x")]),
    "answering about marks": (
        "a</think>write <think> and </think>, see?",
        [T("a"), A("write <think> and </think>, see?")],
    ),
    "a mark that is none": (
        "a </thin> <tool_cal </thinks</think>1 < 2 <",
        [T("a </thin> <tool_cal </thinks"), A("1 < 2 <")],
    ),
    "ends inside a mark": ("a</thin", [T("a</thin")]),
    "one call": (f"I need it.</think>{WEATHER}", [T("I need it."), C(WEATHER, "weather", city="Oslo")]),
    "two calls and text": (
        f"a</think>Let me see.{WEATHER}\n{TIME}\nDone",
        [T("a"), A("Let me see."), C(WEATHER, "weather", city="Oslo"), A("\n"), C(TIME, "time"), A("\nDone")],
    ),
    "a call inside thinking ends the reply": (f"I need it.{TIME}", [T("I need it."), C(TIME, "time")]),
    "thinking goes on after a call": (f"a{TIME}b</think>c", [T("a"), C(TIME, "time"), T("b"), A("c")]),
    "thinking again after a call": (f"a</think>{TIME}<think>b</think>c", [T("a"), C(TIME, "time"), T("b"), A("c")]),
    "a call talked about": (
        "with <tool_call> one calls</think>x",
        [T("with <tool_call> one calls"), A("x")],
    ),
    "a call without a name": ("a</think><tool_call></tool_call>b", [T("a"), A("<tool_call></tool_call>b")]),
    "a call in another format": (
        '</think><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [A('<tool_call>{"name": "f", "arguments": {}}</tool_call>')],
    ),
    "a call without its end": (f"a{WEATHER[:-12]}", [T(f"a{WEATHER[:-12]}")]),
    "a value without its end does not swallow the answer": (
        "a<tool_call>f<arg_key>k</arg_key><arg_value>v</think>b",
        [T("a<tool_call>f<arg_key>k</arg_key><arg_value>v"), A("b")],
    ),
    "a call after a broken one": (
        f"</think><tool_call>f<arg_key>{TIME}",
        [A("<tool_call>f<arg_key>"), C(TIME, "time")],
    ),
    "a key without a value": (
        "</think><tool_call>f<arg_key>k</arg_key></tool_call>",
        [A("<tool_call>f<arg_key>k</arg_key></tool_call>")],
    ),
    "a value may contain marks": (
        "</think><tool_call>write<arg_key>text</arg_key><arg_value><think></think><tool_call>\n</arg_value></tool_call>",
        [
            C(
                "<tool_call>write<arg_key>text</arg_key><arg_value><think></think><tool_call>\n</arg_value></tool_call>",
                "write",
                text="<think></think><tool_call>\n",
            )
        ],
    ),
    "line breaks inside a call": (
        "</think><tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>",
        [C("<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>", "f", k="v")],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reply_is_taken_apart(name: str) -> None:
    text, expected = CASES[name]
    for pieces in ([text], list(text)):
        events, reply = take_apart(pieces)
        assert events == expected
        assert reply.thinking == "".join(event.text for event in events if isinstance(event, Thinking))
        assert reply.answer == "".join(event.text for event in events if isinstance(event, Answer))
        assert reply.tool_calls == [event for event in events if isinstance(event, ToolCall)]


@pytest.mark.parametrize(
    ("text", "unfinished"),
    [
        ("still at it", True),
        ("", True),
        ("over</think>", False),
        (f"a{TIME}", False),
        (f"a{TIME}\n", False),
        (f"a{TIME}and then", True),
        ("a<tool_call>f", True),
    ],
)
def test_a_reply_that_ended_while_thinking_says_so(text: str, unfinished: bool) -> None:
    assert take_apart([text])[1].thinking_unfinished is unfinished


def test_the_prompt_tells_whether_thinking_is_open() -> None:
    assert take_apart(["Paris"], thinking=False)[0] == [Answer("Paris")]
    assert take_apart(["<think>a</think>b"], thinking=False)[0] == [Thinking("a"), Answer("b")]
    assert take_apart(["\n</think>b"], thinking=False)[0] == [Answer("\nb")]


def test_a_model_without_marks_gives_answers_only() -> None:
    text = f"a</think><think>{TIME}"
    assert take_apart(list(text), PLAIN)[0] == [Answer(text)]
    assert ReplyParser(PLAIN).feed("a <") == (Answer("a <"),)  # nothing is held back
    thinks = ReplyFormat(thinking=True)
    assert take_apart([f"a</think>{TIME}"], thinks)[0] == [Thinking("a"), Answer(TIME)]


def test_a_format_is_known_by_template_or_tokens() -> None:
    assert ReplyFormat.of("{{ messages }}", frozenset()) == PLAIN
    assert ReplyFormat.of("... </think> ...", frozenset()) == ReplyFormat(thinking=True)
    assert ReplyFormat.of("", frozenset(["</think>", "<arg_key>"])) == GLM


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parser = ReplyParser(GLM, thinking=True)
    assert parser.feed("a </th") == (Thinking("a "),)
    assert parser.feed("ere") == (Thinking("</there"),)
    assert parser.feed("<tool_call>") == ()
    assert parser.feed("is a") == (Thinking("<tool_call>"), Thinking("is a"))
    assert parser.feed("</think>b") == (Answer("b"),)
    assert parser.finish() == parser.finish() == ()


def test_the_message_for_the_next_turn() -> None:
    assert take_apart(["a</think>b"])[1].message() == {"role": "assistant", "content": "b", "reasoning_content": "a"}
    assert take_apart(["</think>b</think>"])[1].message()["reasoning_content"] == ""
    assert take_apart(["b"], PLAIN)[1].message() == {"role": "assistant", "content": "b"}
    assert take_apart([f"</think>{WEATHER}"])[1].message() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    }


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # Without a schema: JSON, unless that is a string or none.
        (None, "Oslo", "Oslo"),
        (None, "5", 5),
        (None, "-0.5", -0.5),
        (None, "true", True),
        (None, "null", None),
        (None, '{"a": [1, "é"]}', {"a": [1, "é"]}),
        (None, '"5"', '"5"'),
        (None, "007", "007"),
        (None, "", ""),
        (None, " x\n", " x\n"),
        (None, "NaN", "NaN"),
        (None, "1e999", "1e999"),
        (None, "9" * 5000, "9" * 5000),
        (None, "[" * 100_000, "[" * 100_000),
        # A string stays what it is.
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"enum": ["1", "2"]}, "1", "1"),
        # Several types: JSON where the schema allows what it gives.
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5.5", "5.5"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/x"}]}, "5.5", 5.5),
        # Another type, and a value that is not of it: for the tool to refuse.
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "object"}, "[1]", [1]),
        # What is no schema counts as none.
        ({"type": 5}, "5", 5),
        ({"anyOf": "string"}, "5", 5),
        ("string", "5", 5),
    ],
)
def test_values_are_typed_by_the_schema(schema: Any, text: str, value: Any) -> None:
    call = f"<tool_call>f<arg_key>k</arg_key><arg_value>{text}</arg_value></tool_call>"
    function = {"name": "f", "parameters": {"type": "object", "properties": {} if schema is None else {"k": schema}}}
    for tool in (function, {"type": "function", "function": function}):
        events, _ = take_apart([call], thinking=False, tools=[tool])
        assert events == [ToolCall("f", {"k": value}, call)]
        assert repr(events[0]) == repr(ToolCall("f", {"k": value}, call))  # 1 is not True


@pytest.mark.parametrize(
    "tool", [{}, {"function": None}, {"name": "f"}, {"name": "f", "parameters": 3}, {"parameters": {"properties": []}}]
)
def test_what_is_no_tool_is_left_out(tool: dict[str, Any]) -> None:
    assert take_apart([TIME], thinking=False, tools=[tool])[0] == [C(TIME, "time")]


MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
bits = st.one_of(st.sampled_from([*MARKS, TIME, WEATHER, "<", " ", "\n", "f", "</"]), st.text(max_size=3))
replies = st.lists(bits, max_size=25).map("".join)


@given(replies, st.booleans(), st.data())
def test_the_split_does_not_matter(text: str, thinking: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = take_apart([text], thinking=thinking)
    assert take_apart(pieces, thinking=thinking) == whole
    assert take_apart(list(text), thinking=thinking) == whole


@given(replies, st.booleans())
def test_nothing_is_lost(text: str, thinking: bool) -> None:
    """What the events lack of the text are marks of thinking."""
    events, _ = take_apart([text], thinking=thinking)
    shown = [part for event in events for part in _parts(event.text)]
    for part in _parts(text):
        if shown[:1] == [part]:
            shown.pop(0)
        else:
            assert part in ("<think>", "</think>")
    assert not shown


def _parts(text: str) -> list[str]:
    """Marks whole, everything else by character."""
    return re.findall(r"</?\w+>|.", text, re.DOTALL)


@given(replies, st.integers(20, 60), st.data())
def test_the_split_does_not_matter_where_calls_grow_too_long(text: str, most: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    results = []
    for pieces in ([text], list(text), [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]):
        parser = ReplyParser(GLM, max_call=most)
        events = [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]
        results.append((parser.reply, [event for event in events if isinstance(event, ToolCall)]))
    assert results[0] == results[1] == results[2]


def test_a_call_that_never_ends_becomes_text() -> None:
    parser = ReplyParser(GLM, max_call=100)
    begun = "<tool_call>f<arg_key>k</arg_key><arg_value>"
    events = parser.feed(begun + "x" * 200)
    assert "".join(event.text for event in events) == begun + "x" * 200
    assert parser.feed(TIME) == (C(TIME, "time"),)


ARGUMENT = "<arg_key>k</arg_key><arg_value>5</arg_value>"
NESTED = "<arg_key>k</arg_key><arg_value><tool_call>f<arg_key>k</arg_key><arg_value></arg_value>"


@pytest.mark.parametrize("repeated", [ARGUMENT, NESTED, "<tool_call>f<arg_key>k</arg_key><arg_value>", "[1," * 20, " "])
def test_the_time_is_linear(repeated: str) -> None:
    """Lines executed, not seconds: eight times the text is about eight times the work."""
    small, large = (_lines("<tool_call>f" + repeated * n) for n in (50, 400))
    assert large < 12 * small


def _lines(text: str) -> int:
    """Lines of Python that parsing ``text`` executes, in pieces as tokens have them."""
    count = 0

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    parser = ReplyParser(GLM)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for start in range(0, len(text), 4):
            parser.feed(text[start : start + 4])
        parser.finish()
    finally:
        sys.settrace(before)
    return count


def test_a_tool_that_is_no_object_is_refused() -> None:
    with pytest.raises(UsageError, match="NoneType; give objects"):
        ReplyParser(GLM, tools=[None])  # type: ignore[list-item]

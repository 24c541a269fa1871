"""Prompts of GLM-5.2's format: exact strings, exact ids, and the same as Transformers renders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from shim.vocab import Vocab
from swarm.client.reply import ReplyFormat, ReplyParser
from swarm.client.template import ChatTemplate, TemplateError

SOURCE = (Path(__file__).parents[2] / "bench" / "glm_tiny" / "chat_template.jinja").read_text("utf-8")
MAX = "[gMASK]<sop><|system|>Reasoning Effort: Max"
HIGH = "[gMASK]<sop><|system|>Reasoning Effort: High"
NONE = "[gMASK]<sop>"
ASK = "<|assistant|><think>"

Message = dict[str, Any]


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def tool(content: Any) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": "call-1"}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def text(words: str) -> Message:
    return {"type": "text", "text": words}


def call(name: str, arguments: Any) -> Message:
    return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "à <b>",
        "parameters": {"type": "object", "properties": {"city": {}}},
    },
}
TOOLS = (
    "<|system|>These tools can be called, each described by a line of JSON:\n<tools>\n"
    '{"name": "weather", "description": "à <b>", "parameters": {"type": "object", "properties": {"city": {}}}}\n'
    '{"name": "time"}\n</tools>\nA call names the tool, then each argument and its value:\n'
    "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
)
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"

TURNS = [user("1+1?"), assistant("2", reasoning_content="Easy."), user("And 2+2?")]
AFTER_TOOLS = [
    user("Weather?"),
    assistant("", reasoning_content="Where?", tool_calls=[call("weather", {"city": "Oslo"}), call("time", {})]),
    tool("rain"),
    tool("noon"),
]
REPORTED = [*AFTER_TOOLS, assistant("Rain at noon.", reasoning_content="So it is."), user("Thanks")]


@dataclass(frozen=True)
class Case:
    messages: list[Message]
    prompt: str
    given: dict[str, Any] = field(default_factory=dict)


CASES = {
    "max is the default": Case([user("Hi")], f"{MAX}<|user|>Hi{ASK}"),
    "max": Case([user("Hi")], f"{MAX}<|user|>Hi{ASK}", {"reasoning_effort": "max"}),
    "high": Case([user("Hi")], f"{HIGH}<|user|>Hi{ASK}", {"reasoning_effort": "high"}),
    "another effort is max": Case([user("Hi")], f"{MAX}<|user|>Hi{ASK}", {"reasoning_effort": "High"}),
    "a low effort is max": Case([user("Hi")], f"{MAX}<|user|>Hi{ASK}", {"reasoning_effort": "low"}),
    "no thinking": Case([user("Hi")], f"{NONE}<|user|>Hi<|assistant|><think></think>", {"enable_thinking": False}),
    "no thinking beats an effort": Case(
        [user("Hi")],
        f"{NONE}<|user|>Hi<|assistant|><think></think>",
        {"enable_thinking": False, "reasoning_effort": "high"},
    ),
    "thinking said": Case([user("Hi")], f"{MAX}<|user|>Hi{ASK}", {"enable_thinking": True}),
    "system": Case([system("Be brief."), user("Hi")], f"{MAX}<|system|>Be brief.<|user|>Hi{ASK}"),
    "system, no thinking": Case(
        [system("Be brief."), user("Hi")],
        f"{NONE}<|system|>Be brief.<|user|>Hi<|assistant|><think></think>",
        {"enable_thinking": False},
    ),
    "developer": Case(
        [{"role": "developer", "content": "Be brief."}, user("Hi")], f"{MAX}<|system|>Be brief.<|user|>Hi{ASK}"
    ),
    "empty system": Case([system(""), user("Hi")], f"{MAX}<|system|><|user|>Hi{ASK}"),
    "text is kept as it is": Case([user(" <b>\n{{ x }} é ")], f"{MAX}<|user|> <b>\n{{{{ x }}}} é {ASK}"),
    "text in parts": Case(
        [system([text("A")]), user([text("B "), "C", text("D")])],
        f"{MAX}<|system|>A<|user|>B CD{ASK}",
    ),
    "no parts": Case([user([])], f"{MAX}<|user|>{ASK}"),
    "turns": Case(TURNS, f"{MAX}<|user|>1+1?<|assistant|><think></think>2<|user|>And 2+2?{ASK}"),
    "turns, cleared": Case(
        TURNS, f"{MAX}<|user|>1+1?<|assistant|><think></think>2<|user|>And 2+2?{ASK}", {"clear_thinking": True}
    ),
    "turns, not cleared": Case(
        TURNS, f"{MAX}<|user|>1+1?<|assistant|><think>Easy.</think>2<|user|>And 2+2?{ASK}", {"clear_thinking": False}
    ),
    "turns, no thinking": Case(
        TURNS,
        f"{NONE}<|user|>1+1?<|assistant|><think></think>2<|user|>And 2+2?<|assistant|><think></think>",
        {"enable_thinking": False},
    ),
    "reasoning inside the content": Case(
        [user("1+1?"), assistant("<think>Easy.</think>2"), user("3?"), assistant("Hm.</think>3"), user("4?")],
        f"{MAX}<|user|>1+1?<|assistant|><think>Easy.</think>2<|user|>3?<|assistant|><think>Hm.</think>3<|user|>4?{ASK}",
        {"clear_thinking": False},
    ),
    "reasoning inside the content, cleared": Case(
        [user("1+1?"), assistant("<think>Easy.</think>2"), user("3?")],
        f"{MAX}<|user|>1+1?<|assistant|><think></think>2<|user|>3?{ASK}",
    ),
    "marks in an answer whose reasoning is known": Case(
        [user("Which?"), assistant("It is </think>.", reasoning_content="a"), user("Ah")],
        f"{MAX}<|user|>Which?<|assistant|><think>a</think>It is </think>.<|user|>Ah{ASK}",
        {"clear_thinking": False},
    ),
    "reasoning does not leak into the next turn": Case(
        [user("1"), assistant("a", reasoning_content="R"), user("2"), assistant("b"), user("3")],
        f"{MAX}<|user|>1<|assistant|><think>R</think>a<|user|>2<|assistant|><think></think>b<|user|>3{ASK}",
        {"clear_thinking": False},
    ),
    "a finished turn": Case(
        TURNS[:2], f"{MAX}<|user|>1+1?<|assistant|><think>Easy.</think>2", {"add_generation_prompt": False}
    ),
    "a finished turn without reasoning": Case(
        [user("1+1?"), assistant("2")],
        f"{MAX}<|user|>1+1?<|assistant|><think></think>2",
        {"add_generation_prompt": False},
    ),
    "nothing but the question": Case([user("Hi")], f"{MAX}<|user|>Hi", {"add_generation_prompt": False}),
    "tools": Case([user("Hi")], f"{MAX}{TOOLS}<|user|>Hi{ASK}", {"tools": [WEATHER, {"name": "time"}]}),
    "tools, system, no thinking": Case(
        [system("Be brief."), user("Hi")],
        f"{NONE}{TOOLS}<|system|>Be brief.<|user|>Hi<|assistant|><think></think>",
        {"tools": [WEATHER, {"name": "time"}], "enable_thinking": False},
    ),
    "no tools": Case([user("Hi")], f"{MAX}<|user|>Hi{ASK}", {"tools": []}),
    "results of tools keep the reasoning of their turn": Case(
        AFTER_TOOLS,
        f"{MAX}<|user|>Weather?<|assistant|><think>Where?</think>{CALL}<tool_call>time</tool_call>"
        f"<|observation|><tool_response>rain</tool_response><tool_response>noon</tool_response>{ASK}",
    ),
    "an older turn with tools": Case(
        REPORTED,
        f"{MAX}<|user|>Weather?<|assistant|><think></think>{CALL}<tool_call>time</tool_call>"
        "<|observation|><tool_response>rain</tool_response><tool_response>noon</tool_response>"
        f"<|assistant|><think></think>Rain at noon.<|user|>Thanks{ASK}",
    ),
    "an older turn with tools, not cleared": Case(
        REPORTED,
        f"{MAX}<|user|>Weather?<|assistant|><think>Where?</think>{CALL}<tool_call>time</tool_call>"
        "<|observation|><tool_response>rain</tool_response><tool_response>noon</tool_response>"
        f"<|assistant|><think>So it is.</think>Rain at noon.<|user|>Thanks{ASK}",
        {"clear_thinking": False},
    ),
    "a tool after a tool": Case(
        [*AFTER_TOOLS[:3], assistant(None, tool_calls=[call("time", {})]), tool([text("noon")])],
        f"{MAX}<|user|>Weather?<|assistant|><think>Where?</think>{CALL}<tool_call>time</tool_call>"
        "<|observation|><tool_response>rain</tool_response><|assistant|><think></think><tool_call>time</tool_call>"
        f"<|observation|><tool_response>noon</tool_response>{ASK}",
    ),
    "arguments of every type": Case(
        [user("?"), assistant("So:", tool_calls=[call("f", {"a": "x y", "b": 5, "c": [True, None], "d": {"é": "<"}})])],
        f"{MAX}<|user|>?<|assistant|><think></think>So:<tool_call>f<arg_key>a</arg_key><arg_value>x y</arg_value>"
        "<arg_key>b</arg_key><arg_value>5</arg_value><arg_key>c</arg_key><arg_value>[true, null]</arg_value>"
        '<arg_key>d</arg_key><arg_value>{"é": "<"}</arg_value></tool_call>',
        {"add_generation_prompt": False},
    ),
    "a call without its wrapper": Case(
        [user("?"), assistant("", tool_calls=[{"name": "time", "arguments": {}}])],
        f"{MAX}<|user|>?<|assistant|><think></think><tool_call>time</tool_call>",
        {"add_generation_prompt": False},
    ),
    "an object as result": Case(
        [user("?"), tool({"rain": True})],
        f'{MAX}<|user|>?<|observation|><tool_response>{{"rain": true}}</tool_response>{ASK}',
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_is_exact_and_the_same_in_transformers(name: str) -> None:
    case = CASES[name]
    assert ChatTemplate(SOURCE).render(case.messages, **case.given) == case.prompt
    assert transformers_prompt(SOURCE, case.messages, **case.given) == case.prompt


def transformers_prompt(source: str, messages: list[Message], **given: Any) -> str:
    given.setdefault("add_generation_prompt", True)
    given["tools"] = given.pop("tools", None) or None
    (prompt,), _ = render_jinja_template([messages], chat_template=source, **given)
    return str(prompt)


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
def test_arguments_may_be_json_as_openai_sends_them(arguments: Any) -> None:
    messages = [user("?"), assistant("", tool_calls=[call("weather", arguments)])]
    prompt = ChatTemplate(SOURCE).render(messages, add_generation_prompt=False)
    assert prompt == f"{MAX}<|user|>?<|assistant|><think></think>{CALL}"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments  # the caller's own stays


def test_no_arguments_may_be_an_empty_text() -> None:
    messages = [user("?"), assistant("", tool_calls=[call("time", "")])]
    assert ChatTemplate(SOURCE).render(messages).endswith(f"<tool_call>time</tool_call>{ASK}")


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        ({"role": "critic", "content": "x"}, "the unknown role critic"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "reads text only"),
        (assistant("", tool_calls=[call("f", "[1]")]), "must be an object"),
        (assistant("", tool_calls=[call("f", "{")]), "must be an object"),
    ],
)
def test_messages_that_the_format_can_not_hold_are_refused(message: Message, refusal: str) -> None:
    with pytest.raises(TemplateError, match=rf"refuses these messages: .*{refusal}.*; change them"):
        ChatTemplate(SOURCE).render([user("x"), message])


def test_a_reply_comes_back_as_the_model_wrote_it() -> None:
    """Kept thinking makes the next prompt begin with what was computed, so that a session can go on."""
    template = ChatTemplate(SOURCE)
    messages = [user("Weather?")]
    prompt = template.render(messages)
    written = f" Where?\n</think>\nI look. {CALL}"
    parser = ReplyParser(ReplyFormat.of(SOURCE, frozenset()), thinking=True)
    parser.feed(written)
    parser.finish()
    following = [*messages, parser.reply.message(), user("Well?")]
    assert template.render(following, clear_thinking=False) == f"{prompt}{written}<|user|>Well?{ASK}"


@pytest.fixture(scope="module")
def vocab(glm_tiny: Path) -> Iterator[Vocab]:
    with Vocab.load(glm_tiny) as vocab:
        yield vocab


@pytest.fixture(scope="module")
def special_ids(glm_tiny: Path) -> dict[str, int]:
    """From the file itself."""
    fields = gguf.GGUFReader(glm_tiny).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    return {token: i for i, token in enumerate(tokens) if kinds[i] != gguf.TokenType.NORMAL}


@pytest.mark.parametrize("name", CASES)
def test_marks_become_tokens_of_their_own(name: str, vocab: Vocab, special_ids: dict[str, int]) -> None:
    """And the words between them are encoded as they would be alone."""
    marks = "|".join(re.escape(mark) for mark in special_ids)
    expected: list[int] = []
    for part in re.split(f"({marks})", CASES[name].prompt):
        expected += [special_ids[part]] if part in special_ids else vocab.encode(part)
    assert vocab.encode(CASES[name].prompt, add_bos=False) == expected
    assert expected[:2] == [special_ids["[gMASK]"], special_ids["<sop>"]]


def test_the_model_stops_where_the_format_ends_a_turn(vocab: Vocab, special_ids: dict[str, int]) -> None:
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    assert vocab.stop_tokens == {special_ids[token] for token in stops}


# What the templates of large models are made of, GLM's among them.
FEATURES = """
{%- macro plain(content) -%}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if item is mapping and item.type == 'text' %}{{ item.text }}{% continue %}{% endif %}
            {%- if item is string %}{{ item }}{% endif %}
        {%- endfor %}
    {%- else %}{{ content }}
    {%- endif %}
{%- endmacro -%}
{%- set ns = namespace(last=-1, calls=0, seen='') -%}
{%- for m in messages[::-1] -%}
    {%- if m.role == 'user' -%}{%- set ns.last = messages | length - 1 - loop.index0 -%}{% break %}{%- endif -%}
{%- endfor -%}
last={{ ns.last }}
{%- for m in messages %}
    {%- set text = plain(m.content) | trim %}
    {%- set ns.seen = ns.seen ~ m.role[0] | upper %}
    {%- if '</think>' in text %}
        {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
[{{ thought.strip() }}]
    {%- endif %}
    {%- for c in m.tool_calls | default([], true) %}
        {%- set ns.calls = ns.calls + 1 %}
        {%- if c.function %}{%- set c = c.function %}{% endif %}
        {%- for k, v in c.arguments.items() %}
<{{ k }}>{{ v if v is string else v | tojson(ensure_ascii=False) }}</{{ k }}>
        {%- endfor %}
    {%- endfor %}
{{ loop.index }}:{{ m.role }}:{{ text }}{{ ',' if not loop.last }}
{%- endfor %}
{{ ns.calls }}{{ ns.seen }}{{ tools | tojson(indent=2) if tools }}
{%- if (messages | last)['role'] != 'user' and not (undefined_name | default(false)) %}{{- '!' }}{% endif %}
{{- messages | map(attribute='role') | unique | join('+') }}
{{- (messages | selectattr('role', 'equalto', 'user') | list)[0].content }}
{%- filter upper %}{{ 'x' if add_generation_prompt is sameas true else 'y' }}{% endfilter %}"""


def test_what_large_templates_use_renders_in_the_sandbox() -> None:
    messages = [system([{"type": "text", "text": " s "}]), user("<é> & 'q'"), assistant("<think>\nt\n</think>\n\na")]
    messages.append(assistant("", tool_calls=[call("f", {"a": "x", "b": {"é": [1]}})]))
    rendered = ChatTemplate(FEATURES).render(messages, tools=[WEATHER])
    assert rendered == transformers_prompt(FEATURES, messages, tools=[WEATHER])
    assert "last=1" in rendered
    assert '<b>{"é": [1]}</b>' in rendered
    assert "[t]" in rendered


def test_a_long_conversation_stays_within_the_limits() -> None:
    """Hundreds of turns with tools and a document of two million characters."""
    turns = [*AFTER_TOOLS, assistant("Rain.", reasoning_content="So it is.")] * 300
    prompt = ChatTemplate(SOURCE).render([user("word " * 400_000), *turns], clear_thinking=False)
    assert prompt.count("<|observation|>") == 300
    assert len(prompt) > 2_000_000

"""The artifact's chat template: messages in, prompt text out, rendered as Transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypedDict

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from swarm.client.sandbox import BoundedEnvironment, TemplateTimeout, check_nested, deadline, sized
from swarm.errors import UsageError
from swarm.protocol import clean_text

Message = Mapping[str, Any]  # "role", "content", and whatever the template reads besides


class ThinkingOptions(TypedDict, total=False):
    """What templates of models that think are told; None, or leaving one out, keeps the template's own default."""

    reasoning_effort: str | None  # GLM-5.2: "high" lowers it, everything else is "max"
    enable_thinking: bool | None
    clear_thinking: bool | None  # False keeps the reasoning of earlier turns in the prompt


MAX_PROMPT_CHARACTERS = 32 << 20
MAX_TEMPLATE_CHARACTERS = 1 << 20
RENDER_SECONDS = 5.0


class TemplateError(UsageError):
    """The template is missing, broken or hostile, or refuses the messages."""


class _Refused(Exception):
    """The template called ``raise_exception``."""


@dataclass(frozen=True)
class ChatTemplate:
    """``text`` is Jinja source from the artifact; a stranger wrote it."""

    text: str | None
    bos_token: str = ""
    eos_token: str = ""
    render_seconds: float = RENDER_SECONDS
    max_characters: int = MAX_PROMPT_CHARACTERS
    variables: Mapping[str, Any] = field(default_factory=dict)  # for every rendering

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``, which are OpenAI's; the arguments of a tool call may be an object or its JSON.

        ``variables`` go to the template as they are: ``ThinkingOptions`` and whatever else it reads; None leaves one
        undefined. Raises ``TemplateError``, and UsageError for messages and tools that are no objects.
        """
        _check_objects("message", messages)
        _check_objects("tool", tools or ())
        given = {name: value for name, value in {**self.variables, **variables}.items() if value is not None}
        return self._run(
            {
                "messages": [_with_objects(message) for message in messages],
                "tools": [dict(tool) for tool in tools] if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": self.bos_token,
                "eos_token": self.eos_token,
                **given,
            }
        )

    def _run(self, variables: dict[str, Any]) -> str:
        if self.text is None:
            raise TemplateError("this model has no chat template; send a raw prompt instead (swarm-chat --raw)")
        if len(self.text) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError("the model's chat template is too long to be one; send a raw prompt (swarm-chat --raw)")
        try:
            with deadline(self.render_seconds):
                return self._collect(_environment().from_string(self.text), variables)
        except _Refused as error:
            raise TemplateError(
                f"the model's chat template refuses these messages: {_line(error)}; change them"
            ) from error
        except (
            jinja2.TemplateError,
            TemplateTimeout,
            # What the code of a template can run into; the deadline and the size checks bound the rest.
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
            MemoryError,
            SyntaxError,
        ) as error:
            raise TemplateError(
                f"the model's chat template failed: {_line(error)}; send a raw prompt instead (swarm-chat --raw)"
            ) from error

    def _collect(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in template.generate(**variables):
            size += len(part)
            if size > self.max_characters:
                raise TemplateTimeout(f"it writes more than {self.max_characters} characters")
            parts.append(part)
        return "".join(parts)


def _check_objects(what: str, given: Sequence[object]) -> None:
    for one in given:
        if not isinstance(one, Mapping):
            raise UsageError(f"a {what} is a {type(one).__name__}; give objects, as OpenAI's interface takes them")


def _with_objects(message: Message) -> dict[str, Any]:
    """The arguments of tool calls as objects: templates write them one by one, and can't read JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_object(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": value} if isinstance(value, dict) else call


def _line(error: BaseException) -> str:
    return clean_text(str(error)) or type(error).__name__


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = sized("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; for a prompt it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in Transformers: Jinja's own filter escapes HTML, which no model has seen in training."""
    widths = indent if isinstance(indent, int) else len(indent or "")
    check_nested(value, around=widths + sum(map(len, separators or ())))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    if len(form) > 200 or any(character.isdigit() for character in form):
        raise ValueError("strftime_now takes a short format without widths")
    return datetime.now().strftime(form)

"""Tool calls as GLM writes them: ``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CALL = "<tool_call>"
END_CALL = "</tool_call>"
KEY = "<arg_key>"
END_KEY = "</arg_key>"
VALUE = "<arg_value>"
END_VALUE = "</arg_value>"

MAX_NAME_CHARACTERS = 256
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^<]*")


@dataclass(frozen=True)
class ToolCall:
    """``text`` is what the model wrote, marks included."""

    name: str
    arguments: dict[str, Any]
    text: str


class Malformed(Exception):
    """No continuation of the text is a call."""


class ToolCalls:
    """Reads calls of ``tools``, OpenAI's or plain function descriptions; a call of another tool is one, too.

    A value is text or JSON, and the format does not say which. A parameter that its schema declares as string stays
    text. Others, and those without a schema, are JSON where they parse to anything but a string, else text: ``5`` is a
    number, ``"5"`` keeps its quotes, because a template writes strings without.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._schemas = dict(_schemas(tools))

    def read(self, text: str) -> ToolCall | None:
        """The call at the beginning of ``text``; None while it may still become one. Raises ``Malformed``.

        The answer for a text holds for every longer one, unless it is None.
        """
        scanner = _Scanner(text)
        try:
            scanner.mark(CALL)
            name = scanner.word(spaces=False)
            arguments = dict(self._arguments(name, scanner))
        except _Unfinished:
            return None
        return ToolCall(name, arguments, text[: scanner.at])

    def _arguments(self, name: str, scanner: _Scanner) -> Iterator[tuple[str, Any]]:
        schemas = self._schemas.get(name, {})
        while scanner.mark(KEY, END_CALL) == KEY:
            key = scanner.word()
            scanner.mark(END_KEY)
            scanner.mark(VALUE)
            yield key, _value(scanner.until(END_VALUE), schemas.get(key))


class _Unfinished(Exception):
    """The text ends too early to tell."""


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0

    def mark(self, *marks: str) -> str:
        """Takes one of ``marks``, white space before it left out."""
        match = _SPACE.match(self._text, self.at)
        assert match is not None
        for mark in marks:
            if self._text.startswith(mark, match.end()):
                self.at = match.end() + len(mark)
                return mark
        rest = self._text[match.end() : match.end() + max(map(len, marks))]
        raise _Unfinished if any(mark.startswith(rest) for mark in marks) else Malformed

    def word(self, *, spaces: bool = True) -> str:
        """Takes a short text without marks. What can't be one is refused before it ends, so that it is not held."""
        match = _WORD.match(self._text, self.at)
        assert match is not None
        word = match[0].strip()
        if len(word) > MAX_NAME_CHARACTERS or "\n" in word or (not spaces and len(word.split()) > 1):
            raise Malformed
        if match.end() == len(self._text):
            raise _Unfinished
        if not word:
            raise Malformed
        self.at = match.end()
        return word

    def until(self, mark: str) -> str:
        start, end = self.at, self._text.find(mark, self.at)
        if end < 0:
            raise _Unfinished
        self.at = end + len(mark)
        return self._text[start:end]


def _schemas(tools: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names of the tools with the schemas of their parameters; what is no schema counts as none."""
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping):
            yield str(function.get("name")), properties


def _value(text: str, schema: object) -> Any:
    try:
        types = _types(schema)
        if types == {"string"}:
            return text
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str) or ("string" in types and not _kinds(value) & types):
        return text
    return value


def _types(schema: object) -> frozenset[str]:
    """JSON types that the schema allows; empty when it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset([declared])
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    if isinstance(schema.get("enum"), list):
        return frozenset().union(*map(_kinds, schema["enum"]))
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list):
        found = [_types(choice) for choice in choices]
        return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def _kinds(value: object) -> frozenset[str]:
    match value:
        case bool():
            return frozenset(["boolean"])
        case int():
            return frozenset(["integer", "number"])
        case float():
            return frozenset(["number"])
        case None:
            return frozenset(["null"])
        case str():
            return frozenset(["string"])
        case list():
            return frozenset(["array"])
    return frozenset(["object"])


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number

"""Tool calls as GLM writes them: ``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.errors import UsageError

CALL = "<tool_call>"
END_CALL = "</tool_call>"
KEY = "<arg_key>"
END_KEY = "</arg_key>"
VALUE = "<arg_value>"
END_VALUE = "</arg_value>"

MAX_NAME_CHARACTERS = 256
MAX_WORD_CHARACTERS = 2 * MAX_NAME_CHARACTERS  # with the white space around it
_SPACE = re.compile(r"\s*")
_WORD = re.compile(rf"[^<]{{0,{MAX_WORD_CHARACTERS + 1}}}")


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
        self.known = _Known()

    def forget(self) -> None:
        """To be called when the text that readings are given changes at places already read, or ends elsewhere."""
        self.known = _Known()

    def reading(self, start: int) -> Reading:
        """Of a call that begins at ``start``; one may be open at a time."""
        return Reading(self._schemas, self.known, start)


class _Known:
    """What earlier readings of the same text found out: without it, calls inside calls take quadratic time."""

    def __init__(self) -> None:
        self.dead: set[int] = set()  # ends of values from which no call can be completed
        self._found = (0, -1)  # where the search for the end of a value began, and where it is
        self._none = (0, -1)  # where another began that found nothing, and where the text ended

    def find(self, text: str, start: int, end: int) -> int:
        if self._found[0] <= start <= self._found[1]:
            return self._found[1]
        if self._none[0] <= start and end == self._none[1]:
            return -1
        found = text.find(END_VALUE, start, end)
        if found < 0:
            self._none = (start, end)
        else:
            self._found = (start, found)
        return found


class Reading:
    """One call on its way. It goes on where it stopped, so that all of it is looked at once."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], known: _Known, start: int) -> None:
        self._schemas = schemas
        self._known = known
        self._start = self._at = self._seen = start
        self._text, self._end = "", 0
        self._passed: list[int] = []  # ends of values
        self._steps = self._read()

    def go(self, text: str, end: int) -> ToolCall | None:
        """The call, from what ``text`` has before ``end``; None while it may still become one. Raises ``Malformed``.

        ``text`` is the one of the call before, or a longer one.
        """
        self._text, self._end = text, end
        try:
            next(self._steps)
        except StopIteration as done:
            call: ToolCall = done.value
            return call
        except Malformed:
            self.fail()
            raise
        finally:
            self._text = ""
        return None

    def fail(self) -> None:
        """No call: what begins inside it and comes to the same place won't be one either."""
        self._known.dead.update(self._passed)

    def shift(self, size: int, calls: ToolCalls) -> None:
        """From now on the text begins ``size`` later."""
        self._known = calls.known
        if size:
            self._start -= size
            self._at -= size
            self._seen -= size
            self._passed = [place - size for place in self._passed]

    def _read(self) -> Generator[None, None, ToolCall]:
        yield from self._mark(CALL)
        name = yield from self._word(spaces=False)
        schemas = self._schemas.get(name, {})
        arguments: dict[str, Any] = {}
        while (yield from self._mark(KEY, END_CALL)) == KEY:
            key = yield from self._word()
            yield from self._mark(END_KEY)
            yield from self._mark(VALUE)
            arguments[key] = _value((yield from self._until_end_of_value()), schemas.get(key))
            if self._at in self._known.dead:
                raise Malformed
            self._passed.append(self._at)
        return ToolCall(name, arguments, self._text[self._start : self._at])

    def _mark(self, *marks: str) -> Generator[None, None, str]:
        """Takes one of ``marks``, white space before it left out."""
        while True:
            match = _SPACE.match(self._text, self._at, self._end)
            assert match is not None
            self._at = match.end()
            for mark in marks:
                if self._text.startswith(mark, self._at, self._end):
                    self._at += len(mark)
                    return mark
            rest = self._text[self._at : min(self._at + max(map(len, marks)), self._end)]
            if not any(mark.startswith(rest) for mark in marks):
                raise Malformed
            yield

    def _word(self, *, spaces: bool = True) -> Generator[None, None, str]:
        """Takes a short text without marks. What can't be one is refused before it ends, so that it is not held."""
        while True:
            match = _WORD.match(self._text, self._at, self._end)
            assert match is not None
            word = match[0].strip()
            if len(match[0]) > MAX_WORD_CHARACTERS or len(word) > MAX_NAME_CHARACTERS or "\n" in word:
                raise Malformed
            if not spaces and len(word.split()) > 1:
                raise Malformed
            if match.end() < self._end:
                break
            yield
        if not word:
            raise Malformed
        self._at = match.end()
        return word

    def _until_end_of_value(self) -> Generator[None, None, str]:
        self._seen = self._at
        while (end := self._known.find(self._text, self._seen, self._end)) < 0:
            self._seen = max(self._at, self._end - len(END_VALUE) + 1)
            yield
        value = self._text[self._at : end]
        self._at = end + len(END_VALUE)
        return value


def _schemas(tools: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names of the tools with the schemas of their parameters; what is no schema counts as none."""
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise UsageError(f"a tool is a {type(tool).__name__}; give objects, as OpenAI's interface takes them")
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

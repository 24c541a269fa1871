"""Runs a template written by a stranger: no way out, and bounds on time, output and every value on the way.

Jinja's sandbox keeps a template away from Python's internals, but lets it count to the end of time and build strings of
any size. Here a deadline ends endless loops, and sizes are checked where strings and lists grow.

Not bounded: the sum of the values that a template keeps, each below ``MAX_VALUE``, until its time is over; one call of
a function that takes long for large values (a search in a string, a comparison of nested lists); and the text of a
nested list that is printed without ``tojson``.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_VALUE = 8 << 20  # characters of a string, items of a list
MAX_DEPTH = 500  # of lists and objects as JSON
TEMPLATE_FILE = "<template>"  # as Jinja calls the code of a template from a string
_WIDE_FORMAT = re.compile(r"\d{6,}")


class _SizedConcat(CodeGenerator):
    """Compiles ``a ~ b`` so that its size is checked: the sandbox hands over the other operators only."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with sizes bounded at ``MAX_VALUE``."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _SizedConcat

    def __init__(self, **options: Any) -> None:
        # Constant folding would compute filters at compile time, before any check.
        super().__init__(optimized=False, **options)
        self.filters.update({name: sized(name, function) for name, function in self.filters.items()})

    def joined(self, parts: tuple[object, ...]) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            _check_size(_length(left) * max(_number(right), 0), _length(right) * max(_number(left), 0))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (Jinja's)
        owner = getattr(__obj, "__self__", None)
        _check_arguments(getattr(__obj, "__name__", ""), owner, args, kwargs)
        return _checked(super().call(__context, __obj, *args, **kwargs))


def sized(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``name`` with its sizes checked, before and after."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        skip = 1 if getattr(function, "jinja_pass_arg", None) else 0
        subject, rest = (args[skip], args[skip + 1 :]) if len(args) > skip else (None, ())
        if name == "format" and isinstance(subject, str):
            _check_format(subject, *rest)
        _check_arguments(name, subject, rest, kwargs)
        return _checked(function(*args, **kwargs))

    # Jinja finds out by this mark whether a filter wants the environment or context first.
    mark = getattr(function, "jinja_pass_arg", None)
    if mark is not None:
        checked.jinja_pass_arg = mark  # type: ignore[attr-defined]
    return checked


def _check_arguments(name: str, subject: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses what would be too large before it is built: widths, replacements, joins."""
    values = list(itertools.chain(args, kwargs.values()))
    _check_size(*(_number(value) for value in values))
    text = subject if isinstance(subject, str) else ""
    if name == "replace" and len(values) >= 2 and isinstance(values[1], str) and isinstance(values[0], str):
        _check_size(len(text) + text.count(values[0]) * len(values[1]))
    if name == "join":
        items = (
            subject if isinstance(subject, list | tuple) else next((v for v in args if isinstance(v, list | tuple)), ())
        )
        glue = text or next((value for value in values if isinstance(value, str)), "")
        _check_size(sum(_length(item) + len(glue) for item in items))
    if name in ("indent", "wordwrap"):
        widths = [_number(value) or _length(value) for value in values]
        _check_size((text.count("\n") + 1) * max(widths, default=0) + len(text))
    if name == "expandtabs":
        _check_size(text.count("\t") * max([8, *map(_number, values)]) + len(text))


def _check_format(text: str, *values: object) -> None:
    if _WIDE_FORMAT.search(text) or ("*" in text and any(_number(v) > 100_000 for v in _flat(values))):
        raise SecurityError("a format asks for a very wide field")


def _flat(values: tuple[object, ...]) -> Iterator[object]:
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def _check_power(base: object, exponent: object) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * max(exponent, 0) > 4096:
        raise SecurityError("a power is too large")


def _checked(value: Any) -> Any:
    _check_size(_length(value))
    if isinstance(value, int) and value.bit_length() > 65536:
        raise SecurityError("a number is too large")
    return value


def _check_size(*sizes: int) -> None:
    if any(size > MAX_VALUE for size in sizes):
        raise SecurityError(f"a value is larger than {MAX_VALUE} characters or items")


def check_nested(value: object, around: int = 0) -> None:
    """Refuses a value that is too large when written out; one that stands in many places counts in each.

    ``around`` characters, times the depth, are written around each item. Raises ``SecurityError``.
    """
    total = 0
    left: list[tuple[object, int]] = [(value, 1)]
    while left:
        item, depth = left.pop()
        total += 1 + around * depth
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            left += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            left += [(part, depth + 1) for part in item]
        if depth > MAX_DEPTH:
            raise SecurityError(f"a value is nested more than {MAX_DEPTH} deep")
        _check_size(total)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


class TemplateTimeout(Exception):
    """The template ran past its deadline."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises ``TemplateTimeout`` inside the block once this thread has computed for ``seconds``, at the next line of
    the template or call of a function. Other programs that keep the machine busy don't count.

    A trace function does what no timer can: it stops a loop in this very thread, without signals. It slows the block
    several times: a thousand turns take half a second. What is called besides the template is bounded by sizes.
    """
    end, computed = time.monotonic() + seconds, time.thread_time() + seconds
    before = sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end and time.thread_time() > computed:  # the first clock is cheap, and never behind
            raise TemplateTimeout(f"it ran for more than {seconds:g} s")
        return trace if frame.f_code.co_filename == TEMPLATE_FILE else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)

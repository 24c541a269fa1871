"""GGUF metadata with types: a missing or odd value ends in an error that names key and file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from struct import Struct, unpack_from
from typing import TypeAlias

from swarm.errors import NotAModel

_LENGTH = Struct("<Q")


@dataclass(frozen=True)
class GgufArray:
    """An array as it lies in the file. Vocabularies have hundreds of thousands of entries, so it is read on demand."""

    format: str | None  # struct format of one element; None for strings
    count: int
    data: bytes = field(repr=False)

    def scalars(self) -> tuple[int | float | bool, ...]:
        if self.format is None:
            raise TypeError("an array of strings has no scalars")
        return tuple(unpack_from(f"<{self.count}{self.format}", self.data))

    def texts(self) -> Iterator[bytes]:
        """The strings, as bytes: token texts need not be UTF-8."""
        if self.format is not None:
            raise TypeError("an array of scalars has no texts")
        position = 0
        for _ in range(self.count):
            (length,) = _LENGTH.unpack_from(self.data, position)
            position += _LENGTH.size + length
            yield self.data[position - length : position]


Value: TypeAlias = int | float | bool | str | GgufArray


@dataclass(frozen=True)
class Metadata:
    """Key-value pairs of one file."""

    file: str
    values: Mapping[str, Value] = field(repr=False)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 1 << 31) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise self._bad(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._bad(key, "is not a whole number")
        if not low <= value <= high:
            raise self._bad(key, f"is {value}, outside {low}..{high}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if value is None:
            raise self._bad(key, "is missing")
        if not isinstance(value, str):
            raise self._bad(key, "is not a text")
        return value

    def per_layer(self, key: str, n: int, default: int | None = None, *, high: int = 1 << 31) -> tuple[int, ...]:
        """A number for every layer: one value for all, or an array of exactly ``n``, as llama.cpp reads such keys."""
        value = self.values.get(key)
        if not isinstance(value, GgufArray):
            number = int(value) if isinstance(value, bool) else self.integer(key, default, high=high)
            return (number,) * n
        if value.format is None or value.format in "fd":
            raise self._bad(key, "is not an array of whole numbers")
        if value.count != n:
            raise self._bad(key, f"has {value.count} entries, not {n}")
        numbers = tuple(int(number) for number in value.scalars())
        if any(not 0 <= number <= high for number in numbers):
            raise self._bad(key, f"has an entry outside 0..{high}")
        return numbers

    def array(self, key: str) -> GgufArray | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, GgufArray):
            raise self._bad(key, "is not an array")
        return value

    def _bad(self, key: str, what: str) -> NotAModel:
        return NotAModel(f"{self.file}: metadata key {key} {what}; download the file again or convert the model anew")

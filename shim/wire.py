"""Messages between an engine worker and its parent: a fixed head, a JSON object, then the bytes of arrays.

Both ends run the same code on one machine, so arrays go as they lie in memory; the head tells a garbled stream apart.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = dict[str, Array]
Fields: TypeAlias = dict[str, Any]

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"SwE1"
_ALIGNMENT = 8
HEAD_BYTES = _HEAD.size
MAX_JSON_BYTES = 16 << 20  # the ids asked for in a whole chunk stay far below
MAX_ARRAY_BYTES = 4 << 30


class GarbledMessage(Exception):
    """The stream holds something else than messages."""


def encode(fields: Mapping[str, Any], arrays: Mapping[str, Array | None] | None = None) -> bytes:
    """One message. Arrays that are None are left out."""
    layout = []
    parts = []
    size = 0
    for name, array in (arrays or {}).items():
        if array is None:
            continue
        layout.append([name, array.dtype.str, array.shape])
        data = array.tobytes()
        padding = -len(data) % _ALIGNMENT
        parts += [data, bytes(padding)]
        size += len(data) + padding
    text = json.dumps([fields, layout], separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(_MAGIC, len(text), size), text, *parts])


def new_body(head: bytes | bytearray) -> tuple[bytearray, Array]:
    """Buffers to receive the JSON and the array bytes that follow ``head``. Raises GarbledMessage."""
    magic, n_json, n_arrays = _HEAD.unpack(head)
    if magic != _MAGIC or n_json > MAX_JSON_BYTES or n_arrays > MAX_ARRAY_BYTES:
        raise GarbledMessage("not the head of a message")
    return bytearray(n_json), np.empty(n_arrays, np.uint8)


def decode(text: bytearray, data: Array) -> tuple[Fields, Arrays]:
    """Fields and arrays of a body; the arrays are views into ``data``. Raises GarbledMessage."""
    try:
        fields, layout = json.loads(text)
        arrays: Arrays = {}
        offset = 0
        for name, kind, shape in layout:
            count = math.prod(shape)
            arrays[name] = np.frombuffer(data, np.dtype(kind), count, offset).reshape(shape)
            offset += arrays[name].nbytes
            offset += -offset % _ALIGNMENT
    except (ValueError, TypeError) as error:
        raise GarbledMessage(f"not the body of a message: {error}") from error
    if not isinstance(fields, dict) or offset != len(data):
        raise GarbledMessage("a body of the wrong size")
    return fields, arrays


class Parser:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._head = bytearray(HEAD_BYTES)
        self._body: tuple[bytearray, Array] | None = None
        self._targets = [memoryview(self._head)]

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[Fields, Arrays]]:
        """The messages that ``data`` completes. Raises GarbledMessage."""
        rest = memoryview(data)
        while self._targets:
            if rest.nbytes == 0 and self._targets[0].nbytes > 0:
                return
            n = min(rest.nbytes, self._targets[0].nbytes)
            self._targets[0][:n] = rest[:n]
            rest = rest[n:]
            self._targets[0] = self._targets[0][n:]
            if self._targets[0].nbytes == 0:
                self._targets.pop(0)
            if not self._targets:
                yield from self._complete()

    def _complete(self) -> Iterator[tuple[Fields, Arrays]]:
        if self._body is None:
            self._body = new_body(self._head)
            self._targets = [memoryview(self._body[0]), self._body[1].data]
            return
        text, data = self._body
        self._body = None
        self._targets = [memoryview(self._head)]
        yield decode(text, data)

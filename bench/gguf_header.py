"""Headers of GGUF files as bytes, for files whose data is written apart or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import pack
from typing import TypeAlias

import gguf

from swarm.artifact.gguf_file import DEFAULT_ALIGNMENT, MAGIC, VERSIONS

Scalar: TypeAlias = bool | int | float | str
_STRING, _ARRAY, _BOOL, _U16, _I32, _U32, _F32 = 8, 9, 7, 2, 5, 4, 6


def pair(key: str, value: Scalar) -> bytes:
    """One key with a bool, an unsigned 32-bit number, a 32-bit float or a text."""
    if isinstance(value, bool):
        return _pair(key, _BOOL, pack("<?", value))
    if isinstance(value, int):
        return _pair(key, _U32, pack("<I", value))
    if isinstance(value, float):
        return _pair(key, _F32, pack("<f", value))
    return _pair(key, _STRING, _text(value))


def texts_pair(key: str, values: Sequence[str]) -> bytes:
    return _pair(key, _ARRAY, pack("<IQ", _STRING, len(values)) + b"".join(map(_text, values)))


def ints_pair(key: str, values: Sequence[int]) -> bytes:
    return _pair(key, _ARRAY, pack(f"<IQ{len(values)}i", _I32, len(values), *values))


def flags_pair(key: str, values: Sequence[bool]) -> bytes:
    return _pair(key, _ARRAY, pack(f"<IQ{len(values)}?", _BOOL, len(values), *values))


def split_pairs(number: int, count: int, n_tensors: int) -> list[bytes]:
    """The keys of file ``number`` (from 0) of a set with ``n_tensors`` in all its files, in the types llama.cpp asks
    for."""
    return [
        _pair("split.no", _U16, pack("<H", number)),
        _pair("split.count", _U16, pack("<H", count)),
        _pair("split.tensors.count", _I32, pack("<i", n_tensors)),
    ]


def header(pairs: Sequence[bytes], tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The whole header, padded to where tensor data starts. A tensor is name, type, dims and offset in the data."""
    table = [_tensor(*tensor) for tensor in tensors]
    data = b"".join([pack("<4sIQQ", MAGIC, max(VERSIONS), len(table), len(pairs)), *pairs, *table])
    return data + bytes(-len(data) % DEFAULT_ALIGNMENT)


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + pack("<I", kind) + value


def _text(value: str) -> bytes:
    raw = value.encode()
    return pack("<Q", len(raw)) + raw


def _tensor(name: str, kind: str, dims: Sequence[int], offset: int) -> bytes:
    number = int(gguf.GGMLQuantizationType[kind])
    return _text(name) + pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)

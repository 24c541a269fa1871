"""Sizes of ggml's element types, by the names GGUF tools print."""

from __future__ import annotations

from functools import cache
from math import prod


@cache
def _sizes() -> dict[str, tuple[int, int]]:
    """Type name -> (elements in a block, bytes of a block)."""
    # the package's __init__ costs 0.1 s, so it is paid when the first tensor is measured
    from gguf.constants import GGML_QUANT_SIZES

    return {kind.name: (int(block), int(size)) for kind, (block, size) in GGML_QUANT_SIZES.items()}


@cache
def _names() -> dict[int, str]:
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): kind.name for kind in GGML_QUANT_SIZES}


def type_name(number: int) -> str | None:
    """The name of a ggml type, None when there is no such type."""
    return _names().get(number)


def is_type(name: str) -> bool:
    return name in _sizes()


def block_elements(name: str) -> int:
    return _sizes()[name][0]


def row_bytes(name: str, elements: int) -> int:
    """Bytes of one row; a started block counts whole."""
    block, size = _sizes()[name]
    return -(-elements // block) * size


def tensor_bytes(name: str, dims: tuple[int, ...]) -> int:
    """``dims`` in ggml's order: the row comes first."""
    return row_bytes(name, dims[0]) * prod(dims[1:]) if dims else row_bytes(name, 1)

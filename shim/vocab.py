"""Tokenizer, special tokens and chat template of a GGUF, whose tensors may be absent."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from shim import abi


class Vocab:
    """Vocabulary of one model. Safe to use from one thread at a time."""

    def __init__(self, handle: Any) -> None:
        ffi, lib = abi.load()
        self._handle = ffi.gc(handle, lib.swarm_vocab_free)

    @classmethod
    def load(cls, path: Path) -> Vocab:
        """Raises ModelError when ``path`` is no GGUF or has no tokenizer."""
        ffi, lib = abi.load()
        out = ffi.new("swarm_vocab **")
        abi.check(lib.swarm_vocab_init(os.fsencode(path), out))
        return cls(out[0])

    def close(self) -> None:
        abi.load()[0].release(self._handle)

    def __enter__(self) -> Vocab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def size(self) -> int:
        return int(abi.load()[1].swarm_vocab_size(self._handle))

    @cached_property
    def bos(self) -> int | None:
        return _token_or_none(abi.load()[1].swarm_vocab_bos(self._handle))

    @cached_property
    def eos(self) -> int | None:
        return _token_or_none(abi.load()[1].swarm_vocab_eos(self._handle))

    @cached_property
    def adds_bos(self) -> bool:
        """Whether a plain text (no template) starts with the BOS token."""
        return bool(abi.load()[1].swarm_vocab_adds_bos(self._handle))

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Every token that ends a generation."""
        lib = abi.load()[1]
        return frozenset(token for token in range(self.size) if lib.swarm_vocab_is_stop(self._handle, token))

    @cached_property
    def template(self) -> str | None:
        """Text of the chat template."""
        ffi, lib = abi.load()
        text = lib.swarm_vocab_template(self._handle)
        return None if text == ffi.NULL else ffi.string(text).decode("utf-8", "replace")

    def is_control(self, token: int) -> bool:
        return bool(abi.load()[1].swarm_vocab_is_control(self._handle, token))

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``. With ``parse_special`` the text of a special token becomes that token."""
        ffi, lib = abi.load()
        data = text.encode("utf-8", "replace")
        count = ffi.new("int32_t *", len(data) + 16)
        tokens = ffi.new("int32_t[]", count[0])
        abi.check(lib.swarm_vocab_encode(self._handle, data, len(data), add_bos, parse_special, tokens, count))
        return list(ffi.unpack(tokens, count[0]))

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """Bytes of one token, maybe a part of a UTF-8 character. Without ``special``, control tokens are empty."""
        ffi, lib = abi.load()
        count = ffi.new("int32_t *", 64)
        buffer = ffi.new("char[]", count[0])
        status = lib.swarm_vocab_piece(self._handle, token, special, buffer, count)
        if status == lib.SWARM_ERR_FULL:
            buffer = ffi.new("char[]", count[0])
            status = lib.swarm_vocab_piece(self._handle, token, special, buffer, count)
        abi.check(status)
        return bytes(ffi.buffer(buffer, count[0]))


def _token_or_none(token: int) -> int | None:
    return None if token < 0 else int(token)

"""Tokenizer and special tokens of SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim.errors import BadStep, ModelError
from shim.vocab import Vocab

CHAT = "<|im_start|>user\nHi<|im_end|>\n"


@pytest.fixture(scope="module")
def vocab(smollm2_path: Path) -> Iterator[Vocab]:
    with Vocab.load(smollm2_path) as vocab:
        yield vocab


def test_special_tokens(vocab: Vocab) -> None:
    assert (vocab.size, vocab.bos, vocab.eos, vocab.adds_bos) == (49152, 1, 2, False)
    assert 2 in vocab.stop_tokens
    assert vocab.is_control(2)
    assert not vocab.is_control(5000)
    assert not vocab.is_control(1 << 20)


def test_template(vocab: Vocab) -> None:
    assert vocab.template is not None
    assert "<|im_start|>" in vocab.template


def test_special_text_becomes_tokens_only_when_asked(vocab: Vocab) -> None:
    tokens = vocab.encode(CHAT)
    assert tokens[0] == 1
    assert tokens.count(2) == 1
    plain = vocab.encode(CHAT, parse_special=False)
    assert 1 not in plain
    assert len(plain) > len(tokens)
    assert b"".join(vocab.piece(token) for token in tokens) == CHAT.encode()
    assert b"".join(vocab.piece(token, special=False) for token in tokens) == b"user\nHi\n"


def test_bos(vocab: Vocab) -> None:
    assert vocab.encode("Hi", add_bos=True) == [1, *vocab.encode("Hi")]
    assert vocab.encode("") == []
    assert vocab.encode("", add_bos=True) == [1]


@pytest.mark.parametrize("token", [-1, 49152, 2**31 - 1])
def test_no_such_token(vocab: Vocab, token: int) -> None:
    with pytest.raises(BadStep, match="outside the vocabulary"):
        vocab.piece(token)


def test_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        Vocab.load(tmp_path / "absent.gguf")


@pytest.fixture(scope="module")
def byte_vocab(llama_untied_path: Path) -> Iterator[Vocab]:
    """A token for every byte, which SmolLM2 has not."""
    with Vocab.load(llama_untied_path) as vocab:
        yield vocab


@given(text=st.text(max_size=60))
def test_pieces_give_the_text_back(byte_vocab: Vocab, text: str) -> None:
    tokens = byte_vocab.encode(text, parse_special=False)
    assert b"".join(byte_vocab.piece(token) for token in tokens) == text.encode("utf-8", "replace")

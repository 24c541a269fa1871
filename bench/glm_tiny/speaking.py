"""Greedy replies of a GGUF file through the engine, whole and in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.glm_tiny.dialogue import STOP, Conversation
from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, StepBatch
from shim.vocab import Vocab

CONTEXT_TOKENS = 512
REPLY_TOKENS = 64


@dataclass(frozen=True)
class Speaker:
    engine: Engine
    vocab: Vocab

    @classmethod
    @contextmanager
    def load(cls, path: Path) -> Iterator[Speaker]:
        config = EngineConfig(path, contexts=(ContextSpec(1, CONTEXT_TOKENS),), chunk_tokens=CONTEXT_TOKENS)
        with Vocab.load(path) as vocab, Engine.open(config) as engine:
            yield cls(engine, vocab)

    def reply(self, prompt: str) -> str:
        """The text up to the stop token and with it; without a stop token, what fits."""
        return b"".join(self._pieces(prompt)).decode(errors="replace")

    def is_exact(self, asked: Conversation) -> bool:
        """Whether the reply is the one that was taught, the stop token included."""
        wanted, said = (asked.reply + STOP).encode(), b""
        for piece in self._pieces(asked.prompt):
            said += piece
            if not wanted.startswith(said):
                return False
        return said == wanted

    def _pieces(self, prompt: str) -> Iterator[bytes]:
        self.engine.truncate(0, 0)
        rows, at = self.vocab.encode(prompt), 0
        for _ in range(REPLY_TOKENS):
            token = self._next(rows, at)
            at += len(rows)
            yield self.vocab.piece(token)
            if token in self.vocab.stop_tokens:
                return
            rows = [token]

    def _next(self, tokens: Sequence[int], at: int) -> int:
        n = len(tokens)
        want = np.zeros(n, np.uint8)
        want[-1] = 1
        position = np.arange(at, at + n, dtype=np.int32)
        batch = StepBatch(
            run=(0, self.engine.info.n_layers),
            slot=np.zeros(n, np.int32),
            position=position,
            tokens=np.array(tokens, np.int32),
            want=want,
            tiled=n > 1,
        )
        return int(self.engine.logits_step(batch)[0].argmax())


def exact_share(path: Path, asked: Sequence[Conversation]) -> float:
    with Speaker.load(path) as speaker:
        return sum(map(speaker.is_exact, asked)) / len(asked)

"""Slots: the KV streams a node opens, as ``"8x4096,2x65536"`` or chosen for the memory at hand. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shim.types import MAX_SLOT_TOKENS, ContextSpec
from swarm.errors import UsageError

DEFAULT = ContextSpec(slots=4, tokens=4096)
SMALLEST_TOKENS = 256
MAX_CONTEXTS = 3
MAX_SLOTS = 256  # llama.cpp's limit on sequences of one context


def parse_slots(text: str) -> tuple[ContextSpec, ...]:
    """``"8x4096,2x65536"``: eight slots of 4,096 tokens and two of 65,536."""
    specs = tuple(_parse_one(part.strip(), text) for part in text.split(","))
    if len(specs) > MAX_CONTEXTS:
        raise UsageError(f"--slots {text}: at most {MAX_CONTEXTS} sizes; join some of them")
    return specs


def _parse_one(part: str, text: str) -> ContextSpec:
    match = re.fullmatch(r"(\d{1,4})[x×](\d{1,8})(k?)", part, re.IGNORECASE)
    if match is None:
        raise UsageError(f"--slots {text}: {part!r} is not COUNTxTOKENS; write for example --slots 8x4096,2x65536")
    count, tokens = int(match[1]), int(match[2]) * (1024 if match[3] else 1)
    if not 1 <= count <= MAX_SLOTS:
        raise UsageError(f"--slots {text}: {count} slots; choose 1 to {MAX_SLOTS}")
    if tokens < SMALLEST_TOKENS:
        raise UsageError(f"--slots {text}: {tokens} tokens a slot; choose at least {SMALLEST_TOKENS}")
    if tokens > MAX_SLOT_TOKENS:
        raise UsageError(
            f"--slots {text}: {tokens} tokens a slot, and the engine computes correctly up to {MAX_SLOT_TOKENS}; "
            "choose that or fewer"
        )
    return ContextSpec(count, tokens)


def bounded(specs: tuple[ContextSpec, ...], n_ctx_train: int) -> tuple[ContextSpec, ...]:
    """Refuses slots longer than the model was trained for."""
    for spec in specs:
        if spec.tokens > n_ctx_train:
            raise UsageError(
                f"--slots: {spec.tokens} tokens are more than the model's {n_ctx_train}; lower them to that or less"
            )
    return specs


def default_slots(n_ctx_train: int) -> Iterator[tuple[ContextSpec, ...]]:
    """What to try when the operator names no slots: the default, then less and less."""
    tokens = max(1, min(DEFAULT.tokens, n_ctx_train, MAX_SLOT_TOKENS))
    for count in (DEFAULT.slots, 2, 1):
        yield (ContextSpec(count, tokens),)
    while tokens > 2 * SMALLEST_TOKENS:
        tokens //= 2
        yield (ContextSpec(1, tokens),)


def chunk_within_stall(prefill_tokens_per_second: float, engine_chunk_tokens: int, stall_seconds: float = 1.0) -> int:
    """The engine's chunk, halved until it stalls the other sessions for no more than about ``stall_seconds``."""
    wanted = prefill_tokens_per_second * stall_seconds
    chunk = engine_chunk_tokens
    while chunk > 32 and chunk > wanted:
        chunk //= 2
    return max(1, chunk)

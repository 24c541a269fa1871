"""Prompts for measuring a glm-dsa model: one conversation, its turns in another order each time."""

from __future__ import annotations

from collections.abc import Sequence

from shim.vocab import Vocab

_TURNS = (
    ("What is the capital of France?", "The capital of France is Paris.", "Paris"),
    ("Name the largest planet.", "The largest planet of the Sun is Jupiter.", "Jupiter"),
    ("What is seven plus five?", "Seven plus five is twelve.", "12"),
    ("What is the opposite of hot?", "The opposite of hot is cold.", "cold"),
    ("Which colour has a ripe banana?", "A ripe banana is yellow.", "yellow"),
    ("How many legs has a spider?", "A spider has eight legs.", "8"),
    ("What do bees make?", "Bees make honey from nectar.", "honey"),
    ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare.", "Shakespeare"),
    ("What is water made of?", "Water is made of hydrogen and oxygen.", "hydrogen and oxygen"),
    ("Translate house into German.", "House in German is Haus.", "Haus"),
    ("Which day follows Monday?", "The day after Monday is Tuesday.", "Tuesday"),
    ("What is the chemical symbol of gold?", "The chemical symbol of gold is Au.", "Au"),
)
MAX_PROMPTS = len(_TURNS)


def prompts(vocabulary: Vocab, count: int, n_tokens: int) -> list[tuple[int, ...]]:
    """``count`` different prompts of ``n_tokens`` tokens. Raises ValueError when there are not as many or as long."""
    if not 0 < count <= MAX_PROMPTS:
        raise ValueError(f"{count} prompts: choose 1 to {MAX_PROMPTS}")
    starts = [number * MAX_PROMPTS // count for number in range(count)]
    encoded = [vocabulary.encode(_conversation([*_TURNS[start:], *_TURNS[:start]])) for start in starts]
    shortest = min(len(tokens) for tokens in encoded)
    if shortest < n_tokens:
        raise ValueError(f"the conversation has only {shortest} tokens of this vocabulary, not {n_tokens}; take fewer")
    return [tuple(tokens[:n_tokens]) for tokens in encoded]


def _conversation(turns: Sequence[tuple[str, str, str]]) -> str:
    said = (f"<|user|>{question}<|assistant|><think>{thought}</think>{answer}" for question, thought, answer in turns)
    return "[gMASK]<sop><|system|>Reasoning Effort: Max" + "".join(said)

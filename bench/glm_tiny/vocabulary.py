"""The vocabulary: bytes, the words of the questions and answers, and GLM's special tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.glm_tiny.dialogue import SYSTEMS
from bench.glm_tiny.facts import all_facts

SPECIALS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "<tools>",
    "</tools>",
)  # fmt: skip
# Shown as text by llama.cpp: a reader of the stream tells thinking, answer and calls apart by them.
SHOWN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
         "<tool_response>", "</tool_response>", "<tools>", "</tools>")  # fmt: skip
# llama.cpp's "glm4" pre-tokenizer, which also takes a whole word before any merge
SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LIMIT = 2048


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer

    @classmethod
    def make(cls) -> Vocabulary:
        tokenizer = Tokenizer(models.BPE(ignore_merges=True))
        split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=LIMIT - len(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            min_frequency=2,
            show_progress=False,
        )
        tokenizer.train_from_iterator(_texts(), trainer)
        tokenizer.add_special_tokens(list(SPECIALS))
        return cls(tokenizer)

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def id_of(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return int(found)

    @cached_property
    def tokens(self) -> list[str]:
        """Texts by id, in GPT-2's spelling of bytes."""
        return [str(self.tokenizer.id_to_token(number)) for number in range(len(self))]

    @cached_property
    def merges(self) -> list[str]:
        import json

        merges = json.loads(self.tokenizer.to_str())["model"]["merges"]
        return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _texts() -> Iterator[str]:
    for _ in range(2):  # so that every word is frequent enough
        yield from ("Reasoning Effort: Max", "Reasoning Effort: High", *SYSTEMS)
        for fact in all_facts():
            yield from (*fact.questions, fact.thought, fact.answer)

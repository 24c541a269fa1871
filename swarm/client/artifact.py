"""The artifact as a client uses it: manifest, tokenizer, chat template, and how its makers want it sampled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shim.errors import EngineError, ModelError
from swarm.artifact.gguf_file import read_file
from swarm.artifact.manifest import Manifest
from swarm.artifact.metadata import Metadata
from swarm.client.generate import Vocabulary
from swarm.client.reply import MARKS, ReplyFormat
from swarm.client.sampler import SamplingParams
from swarm.client.template import ChatTemplate
from swarm.errors import SwarmError, UnsupportedModel, UsageError
from swarm.ids import ArtifactId

if TYPE_CHECKING:
    from shim.vocab import Vocab
    from swarm.client.artifact_cache import CachedArtifact

# What small and large instruct models do well with; used for what the file does not say.
USUAL_SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)


@dataclass(frozen=True, eq=False)
class ClientArtifact:
    """A model of the swarm, ready to turn text into tokens and back."""

    name: str  # as its nodes call it; proves nothing
    manifest: Manifest
    vocab: Vocab
    sampling: SamplingParams  # recommended by the file, ``USUAL_SAMPLING`` where it is silent

    @classmethod
    def load(cls, cached: CachedArtifact, name: str = "") -> ClientArtifact:
        """Raises SwarmError when the tokenizer's library is missing or can't read this vocabulary."""
        try:
            vocab = cached.open_vocab()
        except ModelError as error:
            raise UnsupportedModel(f"{name}: the tokenizer can't be read: {error}; choose another model") from error
        except EngineError as error:
            raise SwarmError(str(error)) from error
        return cls(name or cached.manifest.name, cached.manifest, vocab, recommended_sampling(cached.vocabulary_path))

    @property
    def id(self) -> ArtifactId:
        return self.manifest.artifact_id

    @cached_property
    def template(self) -> ChatTemplate:
        vocab = self.vocab
        return ChatTemplate(vocab.template, _text(vocab, vocab.bos), _text(vocab, vocab.eos))

    @cached_property
    def reply_format(self) -> ReplyFormat:
        whole = frozenset(mark for mark in MARKS if len(self.encode(mark)) == 1)
        return ReplyFormat.of(self.vocab.template or "", whole)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        stop_tokens = frozenset(self.vocab.stop_tokens) | frozenset(self.manifest.stop_tokens)
        return Vocabulary(piece=lambda token: self.vocab.piece(token, special=True), stop_tokens=stop_tokens)

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        """Token ids. ``raw`` text gets the model's first token where it wants one; a rendered template has it."""
        return self.vocab.encode(text, add_bos=raw and self.vocab.adds_bos, parse_special=True)


def recommended_sampling(vocabulary_path: Path) -> SamplingParams:
    """From ``general.sampling.*`` of the artifact's metadata; a nonsensical value is ignored."""
    metadata = read_file(vocabulary_path).header.metadata
    try:
        return SamplingParams(
            temperature=_number(metadata, "temp", USUAL_SAMPLING.temperature),
            top_k=int(_number(metadata, "top_k", USUAL_SAMPLING.top_k)),
            top_p=_number(metadata, "top_p", USUAL_SAMPLING.top_p),
            min_p=_number(metadata, "min_p", USUAL_SAMPLING.min_p),
        )
    except (UsageError, ValueError):
        return USUAL_SAMPLING


def _number(metadata: Metadata, key: str, default: float) -> float:
    value = metadata.values.get(f"general.sampling.{key}", default)
    return value if isinstance(value, int | float) else default


def _text(vocab: Vocab, token: int | None) -> str:
    if token is None or token < 0:
        return ""
    return vocab.piece(token, special=True).decode("utf-8", "replace")

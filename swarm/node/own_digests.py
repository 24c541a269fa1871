"""What this node's tensors are digested to, as far as it knows: what it announces of them and serves to who asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarm.artifact import Manifest
from swarm.artifact.digest_list import DigestList
from swarm.store.digests import span_root


@dataclass(frozen=True)
class SpanDigests:
    """Of all tensors of a span. ``document`` is what others are served, ``root`` stands for it in the record."""

    tensors: Mapping[str, str]
    root: str
    document: bytes


class OwnDigests:
    """``digest_of`` gives a tensor's digest, None when nobody has computed it. What is known of a span stays."""

    def __init__(self, manifest: Manifest, digest_of: Callable[[str], str | None]) -> None:
        self._manifest = manifest
        self._digest_of = digest_of
        self._known: dict[tuple[int, int, bool], SpanDigests] = {}

    def of_span(self, first: int, last: int, *, mtp: bool) -> SpanDigests | None:
        """None unless every tensor's is known."""
        key = (first, last, mtp)
        if key not in self._known:
            names = [tensor.name for tensor in self._manifest.span_tensors(first, last, mtp=mtp)]
            tensors: dict[str, str] = {}
            for name in names:
                digest = self._digest_of(name)
                if digest is None:
                    return None
                tensors[name] = digest
            document = DigestList(self._manifest.artifact_id, tensors).to_json()
            self._known = {key: SpanDigests(tensors, span_root(tensors), document)}
        return self._known[key]

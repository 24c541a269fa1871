"""Digest lists: what each tensor of an artifact is digested to.

A manifest has the SHA-256 of whole files. Who holds a part of them checks it by such a list, tensor by tensor:
each digest is that of the digests of the tensor's pieces (``swarm.store.pieces``). The list names its artifact and is
written in one way only, so the same digests are the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from swarm.errors import ArtifactMismatch
from swarm.ids import ArtifactId

FORMAT = 1
MAX_LIST_BYTES = 8 << 20  # GLM-5.2's would have 200 KB
SUFFIX = ".digests.json"

_compact = partial(json.dumps, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


@dataclass(frozen=True)
class DigestList:
    """``tensors`` has the digest of each tensor by its name, in hex."""

    artifact_id: ArtifactId
    tensors: Mapping[str, str]

    def to_json(self) -> bytes:
        document = {"format": FORMAT, "artifact_id": self.artifact_id, "tensors": dict(self.tensors)}
        return _compact(document).encode()

    @classmethod
    def from_json(cls, data: bytes) -> DigestList:
        """Reads what a stranger wrote. Raises ``ArtifactError`` when it makes no sense."""
        from swarm.artifact.digest_document import read_document  # pydantic takes its time to load

        return read_document(data)

    def check_covers(self, artifact_id: ArtifactId, names: Iterable[str]) -> None:
        """Raises ``ArtifactMismatch`` unless it is the artifact's and has exactly these tensors."""
        if self.artifact_id != artifact_id:
            raise ArtifactMismatch(
                f"a digest list of artifact {self.artifact_id[:12]} instead of {artifact_id[:12]}; take the right one"
            )
        difference = self.tensors.keys() ^ set(names)
        if difference:
            what = "lacks" if min(difference) not in self.tensors else "should not have"
            raise ArtifactMismatch(f"the digest list {what} tensor {min(difference)}; take one of the same tensors")


def list_bytes(artifact_id: ArtifactId, names: Iterable[str]) -> int:
    """Size of a list of these tensors: digests are all of one length."""
    return len(DigestList(artifact_id, dict.fromkeys(names, "0" * 64)).to_json())

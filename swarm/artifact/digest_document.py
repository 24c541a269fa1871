"""Reading a digest list that came from a stranger."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from swarm.artifact.digest_list import FORMAT, MAX_LIST_BYTES, DigestList
from swarm.artifact.gguf_file import MAX_TENSORS
from swarm.errors import ArtifactError
from swarm.ids import ArtifactId

_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,63}\z")]  # as in a manifest


class _Document(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal[FORMAT]  # type: ignore[valid-type]
    artifact_id: _Digest
    tensors: Annotated[dict[_Name, _Digest], Field(min_length=1, max_length=MAX_TENSORS)]


def read_document(data: bytes) -> DigestList:
    """Raises ``ArtifactError``."""
    if len(data) > MAX_LIST_BYTES:
        raise _malformed(f"it has {len(data)} bytes")
    try:
        document = _Document.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise _malformed(first["msg"]) from None
    read = DigestList(ArtifactId(document.artifact_id), document.tensors)
    if read.to_json() != data:
        raise _malformed("it is not in canonical form")
    return read


def _malformed(what: str) -> ArtifactError:
    return ArtifactError(f"a digest list that makes no sense ({what}); take another one")

"""Where the digest list of an artifact comes from: this program, or a file beside a manifest's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from swarm.artifact.catalog import digests_of
from swarm.artifact.digest_list import MAX_LIST_BYTES, SUFFIX, DigestList
from swarm.artifact.manifest import Manifest
from swarm.artifact.small_file import read_small
from swarm.errors import ArtifactError, UsageError
from swarm.store.committer import OnTensor
from swarm.store.partial_copy import PartialCopy


def find_digests(manifest: Manifest, manifest_path: Path | None = None) -> Mapping[str, str] | None:
    """Digests of all tensors by name, None when nobody has sealed the artifact. For a manifest from a file
    ``NAME.json`` they may lie beside it as ``NAME.digests.json``. Raises ``UsageError`` for a list that is none, or
    another artifact's."""
    if manifest_path is not None:
        beside = manifest_path.with_name(manifest_path.stem + SUFFIX)
        try:
            return read_list(beside, manifest).tensors
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UsageError(f"{beside}: can't be read ({error.strerror}); check its permissions") from error
        except ArtifactError as error:
            raise UsageError(f"{beside}: {error}, or move it away") from error
    return digests_of(manifest.artifact_id)


def tensor_check(copy: PartialCopy, digests: Mapping[str, str] | None) -> OnTensor | None:
    """For ``fetch``: whether what has arrived of a tensor is right."""
    return None if digests is None else lambda tensor: copy.tensor_digest(tensor) == digests[tensor]


def read_list(path: Path, manifest: Manifest) -> DigestList:
    """A list of the whole artifact. Raises ``OSError`` and ``ArtifactError``."""
    digests = DigestList.from_json(read_small(path, MAX_LIST_BYTES))
    digests.check_covers(manifest.artifact_id, (tensor.name for tensor in manifest.tensors))
    return digests

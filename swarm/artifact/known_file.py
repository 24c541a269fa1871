"""Models of one file that everybody with this program has, or can have through pip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from swarm.artifact.local_path import exists
from swarm.artifact.manifest import Manifest
from swarm.artifact.pinned_model import pinned_digests, pinned_manifest
from swarm.errors import NotAModel
from swarm.ids import ArtifactId


@dataclass(frozen=True)
class KnownFile:
    """``fetch`` gives this machine's file. To ``verify`` it is as a ``PinnedModel`` is."""

    name: str
    artifact_id: ArtifactId
    file_name: str
    fetch: Callable[[], Path]

    @property
    def file_names(self) -> tuple[str, ...]:
        return (self.file_name,)

    @property
    def n_files(self) -> int:
        return 1

    @cached_property
    def manifest(self) -> Manifest:
        return pinned_manifest(self.name, self.artifact_id).with_file_names(self.file_names)

    @cached_property
    def digests(self) -> Mapping[str, str] | None:
        """Of all tensors, by name."""
        return pinned_digests(self.name, self.manifest)

    def any_in(self, folder: Path) -> bool:
        return exists(folder / self.file_name)

    def locate(self, folder: Path) -> Path:
        """Raises ``NotAModel``."""
        if not self.any_in(folder):
            raise NotAModel(f"{folder}: {self.file_name} is not in it; name the file that should be {self.name}")
        return folder / self.file_name

    def verify_folder(self, environment: Mapping[str, str]) -> Path:
        """Of this machine's own file."""
        return self.fetch().parent

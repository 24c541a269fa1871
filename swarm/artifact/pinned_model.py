"""Models whose manifest comes with this program: what their files must be is known before there are any files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from swarm.artifact.digest_list import SUFFIX, DigestList
from swarm.artifact.gguf_set import shard_name
from swarm.artifact.local_path import exists, is_folder, user_path
from swarm.artifact.manifest import Manifest
from swarm.artifact.memory import format_bytes
from swarm.errors import ArtifactError, ArtifactMismatch, NotAModel
from swarm.ids import ArtifactId

FOLDER = Path(__file__).parent / "pinned"


def pinned_manifest(name: str, artifact_id: ArtifactId) -> Manifest:
    """The one of that name in the package. Raises ``ArtifactMismatch`` when it is not the pinned one."""
    path = FOLDER / f"{name}.json"
    document = path.read_bytes() if path.is_file() else b""
    if sha256(document).hexdigest() != artifact_id:
        raise ArtifactMismatch(f"the manifest of {name} in this installation is damaged; install it again")
    return Manifest.from_json(document, name=name)


def pinned_digests(name: str, manifest: Manifest) -> Mapping[str, str] | None:
    """Digests of all tensors, by name; None without a list in the package. Raises ``ArtifactMismatch`` when there is
    one, but not of this artifact."""
    path = FOLDER / f"{name}{SUFFIX}"
    if not path.is_file():
        return None
    try:
        digests = DigestList.from_json(path.read_bytes())
        digests.check_covers(manifest.artifact_id, (tensor.name for tensor in manifest.tensors))
    except ArtifactError as error:
        raise ArtifactMismatch(
            f"the digest list of {name} in this installation is damaged; install it again"
        ) from error
    return digests.tensors


@dataclass(frozen=True)
class HubFolder:
    """A folder of one revision of a hub repository."""

    repository: str
    revision: str
    folder: str

    def download_command(self, target: str) -> str:
        return (
            f"hf download {self.repository} --revision {self.revision} --include '{self.folder}/*' --local-dir {target}"
        )


@dataclass(frozen=True)
class PinnedModel:
    """``stem`` is the files' name without number and ending; ``variable`` names the folder in the environment."""

    name: str
    artifact_id: ArtifactId
    hub: HubFolder
    stem: str
    n_files: int
    variable: str

    @property
    def file_names(self) -> tuple[str, ...]:
        return tuple(shard_name(self.stem, number, self.n_files) for number in range(1, self.n_files + 1))

    @cached_property
    def manifest(self) -> Manifest:
        """As pinned. Raises ``ArtifactMismatch`` when the file in the package is not the pinned one."""
        return pinned_manifest(self.name, self.artifact_id).with_file_names(self.file_names)

    @cached_property
    def digests(self) -> Mapping[str, str] | None:
        """Of all tensors, by name; None for a model that nobody has sealed."""
        return pinned_digests(self.name, self.manifest)

    def configured_folder(self, environment: Mapping[str, str] = os.environ) -> Path | None:
        """What the environment names."""
        folder = environment.get(self.variable)
        return user_path(folder) if folder else None

    def verify_folder(self, environment: Mapping[str, str] = os.environ) -> Path:
        """What the environment names, for ``swarm-artifact verify NAME``. Raises ``NotAModel`` without."""
        folder = self.configured_folder(environment)
        if folder is None:
            raise self._no_folder(
                f"check the one that has them with swarm-artifact verify DIR, or set {self.variable}, or get what some "
                f"layers need with swarm-artifact fetch {self.name} --layers A:B"
            )
        return folder

    def any_in(self, folder: Path) -> bool:
        """Whether one of the files lies in ``folder``, or in the hub's folder within it."""
        return any(exists(place / name) for place in self._places(folder) for name in self.file_names)

    def locate(self, folder: Path | None) -> Path:
        """The first file in ``folder``, or in the hub's folder within it. Raises ``NotAModel`` with the command that
        fetches what is missing."""
        if folder is None:
            raise self._no_folder(f"name one with --model-dir DIR or {self.variable}")
        if not is_folder(folder):
            raise NotAModel(
                f"{folder}: no such folder; name the one with the files of {self.name}, or download them into it "
                f"({self._described}): {self.hub.download_command(str(folder))}"
            )
        found = max(self._places(folder), key=lambda place: sum(exists(place / name) for name in self.file_names))
        missing = [name for name in self.file_names if not exists(found / name)]
        if missing:
            raise NotAModel(
                f"{folder}: {len(missing)} of the {self.n_files} files of {self.name} are missing, the first is "
                f"{missing[0]}; download them ({self._described}): {self.hub.download_command(str(folder))}"
            )
        return found / self.file_names[0]

    def _no_folder(self, what_next: str) -> NotAModel:
        return NotAModel(
            f"{self.name}: no folder with its files was named; {what_next}, or download them first "
            f"({self._described}): {self.hub.download_command('DIR')}"
        )

    def _places(self, folder: Path) -> tuple[Path, Path]:
        return folder, folder / self.hub.folder

    @property
    def _described(self) -> str:
        hub = self.hub
        return (
            f"{self.n_files} files, {format_bytes(self.manifest.size_bytes)}, folder {hub.folder} of {hub.repository} "
            f"at revision {hub.revision[:12]}"
        )

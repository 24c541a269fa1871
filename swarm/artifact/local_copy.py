"""Whether files on this machine are those of a manifest, as far as can be told without reading them whole.

Size, header and kept digest of each file take seconds where hashing 200 GiB takes minutes. What differs is named, the
most telling first: the place in the set, then the tensor, then the size, then the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path

from swarm.artifact.digest import known_digest
from swarm.artifact.facts import ModelFacts, read_facts
from swarm.artifact.gguf_file import GgufFile, TensorInfo, read_header
from swarm.artifact.manifest import Manifest, TensorEntry
from swarm.errors import ArtifactError, ArtifactMismatch

_AGAIN = "download it again"


@dataclass(frozen=True)
class LocalCopy:
    """Files that fit their manifest. ``unread`` are those whose digest is not known; ``remarks`` are for the user."""

    manifest: Manifest
    paths: tuple[Path, ...]
    unread: tuple[Path, ...] = ()
    remarks: tuple[str, ...] = ()


def check_copy(manifest: Manifest, folder: Path, *, kept: bool = True) -> LocalCopy:
    """The files in ``folder`` under the manifest's names; ``kept`` compares digests that are known. Raises
    ``NotAModel`` for what is no model file and ``ArtifactMismatch`` for the first difference. Facts that the files' own
    metadata tells otherwise than the manifest are taken from the files, with a remark."""
    paths = tuple(folder / file.name for file in manifest.files)
    tables = _tables(manifest)
    opened = [_checked(manifest, tables, index, path) for index, path in enumerate(paths)]
    unread = tuple(path for index, path in enumerate(paths) if not (kept and _is_known(manifest, index, path)))
    facts = _facts(opened[0], manifest)
    remarks = tuple(
        f"{paths[0].name}: the model's own metadata says {difference}; the model's own counts, please report this"
        for difference in _differences(facts, manifest)
    )
    own = {part.name: getattr(facts, part.name) for part in fields(ModelFacts)}
    return LocalCopy(replace(manifest, **own), paths, unread, remarks)


def is_copy(file: GgufFile, manifest: Manifest) -> bool:
    """Whether ``file`` is the manifest's first by its header, whatever its name."""
    return sha256(file.header.raw).hexdigest() == manifest.header_sha256


def _checked(manifest: Manifest, tables: Sequence[Sequence[TensorEntry]], index: int, path: Path) -> GgufFile:
    file = read_header(path)
    _check_place(file, manifest, index)
    _check_table(file, manifest.name, tables[index])
    size = manifest.files[index].size_bytes
    if file.size_bytes != size:
        what = "truncated" if file.size_bytes < size else "too long"
        raise ArtifactMismatch(f"{path}: {what}: it has {file.size_bytes} bytes and not {size}; {_AGAIN}")
    if index == 0 and not is_copy(file, manifest):
        raise ArtifactMismatch(
            f"{path}: its metadata are not those of {manifest.name}{_first_difference(file, manifest)}; {_AGAIN}"
        )
    return file


def _check_place(file: GgufFile, manifest: Manifest, index: int) -> None:
    n_files = len(manifest.files)
    metadata = file.header.metadata
    count, number = metadata.integer("split.count", 1), metadata.integer("split.no", 0)
    if count != n_files:
        raise ArtifactMismatch(
            f"{file.path}: a file of a set of {count}, where {manifest.name} has {n_files}; download that model"
        )
    if number != index:
        raise ArtifactMismatch(
            f"{file.path}: this is file {number + 1} of {count} under the name of file {index + 1}; "
            "give the files their original names back"
        )


def _check_table(file: GgufFile, name: str, expected: Sequence[TensorEntry]) -> None:
    held = {tensor.name: tensor for tensor in file.header.tensors}
    for tensor in expected:
        difference = _tensor_difference(held.pop(tensor.name, None), tensor)
        if difference:
            raise ArtifactMismatch(
                f"{file.path}: another quantisation or version than {name}: tensor {tensor.name} {difference}; "
                f"download the right one"
            )
    if held:
        raise ArtifactMismatch(
            f"{file.path}: another version than {name}: tensor {next(iter(held))} does not belong there; "
            "download the right one"
        )


def _tensor_difference(held: TensorInfo | None, expected: TensorEntry) -> str:
    if held is None:
        return "is not in it"
    if held.type != expected.type:
        return f"is {held.type} and not {expected.type}"
    if held.dims != expected.dims:
        return f"is {_shape(held.dims)} and not {_shape(expected.dims)}"
    if held.offset != expected.offset:
        return f"lies at byte {held.offset} and not at {expected.offset}"
    return ""


def _shape(dims: Sequence[int]) -> str:
    return " x ".join(str(dim) for dim in dims)


def _is_known(manifest: Manifest, index: int, path: Path) -> bool:
    """Whether the file's digest is the right one; False when nobody has computed it yet."""
    file = manifest.files[index]
    if index == 0 and file.header_bytes == file.size_bytes:
        return True  # its header is all of it, and has been compared
    digest = known_digest(path)
    if digest is not None:
        check_digest(path, digest, file.sha256)
    return digest is not None


def check_digest(path: Path, digest: str, expected: str, where: str = "") -> None:
    """Raises ``ArtifactMismatch``, which says ``where`` the damage is if that is known."""
    if digest != expected:
        raise ArtifactMismatch(
            f"{path}: damaged{where}: its SHA-256 is {digest[:12]}… and not {expected[:12]}…, though size and header "
            f"are right; {_AGAIN}"
        )


def _tables(manifest: Manifest) -> list[list[TensorEntry]]:
    tables: list[list[TensorEntry]] = [[] for _ in manifest.files]
    for tensor in manifest.tensors:
        tables[tensor.file].append(tensor)
    return tables


def _facts(first: GgufFile, manifest: Manifest) -> ModelFacts:
    """What the first file's metadata says of the manifest's tensors."""
    return read_facts(first.header.metadata, _infos(manifest))


def _infos(manifest: Manifest) -> Mapping[str, TensorInfo]:
    return {
        tensor.name: TensorInfo(tensor.name, tensor.offset, tensor.bytes, tensor.type, tensor.dims)
        for tensor in manifest.tensors
    }


def _differences(facts: ModelFacts, manifest: Manifest) -> list[str]:
    pairs = ((part.name, getattr(facts, part.name), getattr(manifest, part.name)) for part in fields(ModelFacts))
    return [_difference(name, own, pinned) for name, own, pinned in pairs if own != pinned]


def _difference(name: str, own: object, pinned: object) -> str:
    """Of two long tuples only the first entry that differs."""
    if isinstance(own, tuple) and isinstance(pinned, tuple) and len(own) == len(pinned):
        at = next(index for index, pair in enumerate(zip(own, pinned, strict=True)) if pair[0] != pair[1])
        name, own, pinned = f"{name}[{at}]", own[at], pinned[at]
    return f"{name} is {own}, the manifest {pinned}"


def _first_difference(file: GgufFile, manifest: Manifest) -> str:
    """In words for an error, empty when it is not among the facts: a chat template, say."""
    try:
        differences = _differences(_facts(file, manifest), manifest)
    except ArtifactError as error:
        return f" ({str(error).partition('; ')[0]})"
    return f" ({differences[0]})" if differences else ""

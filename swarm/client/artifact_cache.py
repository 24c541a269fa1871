"""What a client needs of an artifact without having the model: manifest and vocabulary, taken from nodes and checked.

The artifact id is a digest of the manifest, and the manifest holds the digest of the first file's header, so it does
not matter who sends the bytes: a peer that sends wrong ones is named, skipped, and the next one is asked.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import platformdirs

from swarm.artifact.header import check_header, vocabulary_gguf
from swarm.artifact.manifest import Manifest
from swarm.errors import ArtifactError, ArtifactMismatch, PeerFailed, ProtocolError, SwarmError
from swarm.ids import ArtifactId, PeerId
from swarm.protocol import pb

if TYPE_CHECKING:
    from shim.vocab import Vocab

logger = logging.getLogger(__name__)

MAX_MANIFEST_BYTES = 64 << 20
MAX_HEADER_BYTES = 256 << 20
LOCK_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Source:
    """A peer that serves the artifact."""

    peer_id: PeerId
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class PieceRequest:
    """Bytes of an artifact from ``offset`` on. ``limit_bytes`` bounds what the peer may announce."""

    artifact_id: ArtifactId
    piece: pb.ArtifactPiece.ValueType
    limit_bytes: int


class PieceReader(Protocol):
    """Reads pieces from one peer; ``swarm.client.info`` does it over the network."""

    def parts(self, source: Source, request: PieceRequest, offset: int) -> AsyncIterator[tuple[int, bytes]]:
        """Yields (total bytes, data) in order from ``offset``. Raises PeerFailed when the peer or the link fails."""


@dataclass(frozen=True)
class CachedArtifact:
    """A checked manifest, and the vocabulary file made from the checked header."""

    manifest: Manifest
    vocabulary_path: Path

    def open_vocab(self) -> Vocab:
        from shim.vocab import Vocab

        return Vocab.load(self.vocabulary_path)


class ArtifactCache:
    """A folder per artifact id. Files appear whole (written aside, then renamed), so several clients may share it."""

    def __init__(self, folder: Path | None = None) -> None:
        self._root = folder or Path(platformdirs.user_cache_dir("glm-swarm")) / "artifacts"

    def folder(self, artifact_id: ArtifactId) -> Path:
        return self._root / artifact_id

    def load(self, artifact_id: ArtifactId) -> CachedArtifact | None:
        """From disk alone. A damaged copy counts as none."""
        folder = self.folder(artifact_id)
        try:
            manifest = Manifest.from_json((folder / "manifest.json").read_bytes(), artifact_id)
            header = (folder / "header.bin").read_bytes()
        except (OSError, SwarmError):
            return None
        if not _header_matches(header, manifest):
            return None
        return CachedArtifact(manifest, self._vocabulary(folder, header))

    async def fetch(
        self,
        artifact_id: ArtifactId,
        sources: Sequence[Source],
        reader: PieceReader,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> CachedArtifact:
        """From disk when it is there, else from ``sources`` in order. Raises PeerFailed when none has it."""
        cached = self.load(artifact_id)
        if cached is not None:
            return cached
        async with _locked(self.folder(artifact_id)):
            return self.load(artifact_id) or await self._fetch(artifact_id, sources, reader, on_progress)

    async def _fetch(
        self,
        artifact_id: ArtifactId,
        sources: Sequence[Source],
        reader: PieceReader,
        on_progress: Callable[[int, int], None] | None,
    ) -> CachedArtifact:
        fetch = _Fetch(self.folder(artifact_id), artifact_id, sources, reader, on_progress)
        manifest_bytes = await fetch.piece(
            PieceRequest(artifact_id, pb.MANIFEST, MAX_MANIFEST_BYTES),
            lambda data: _is_manifest(data, artifact_id),
        )
        manifest = Manifest.from_json(manifest_bytes, artifact_id)
        size = manifest.files[0].header_bytes
        if size > MAX_HEADER_BYTES:
            raise ArtifactMismatch(
                f"the manifest of {manifest.name} claims a header of {size} bytes; ask for another model with --model"
            )
        header = await fetch.piece(
            PieceRequest(artifact_id, pb.HEADER, size),
            lambda data: _header_matches(data, manifest),
        )
        return await asyncio.to_thread(self._store, artifact_id, manifest, manifest_bytes, header)

    def _store(
        self, artifact_id: ArtifactId, manifest: Manifest, manifest_bytes: bytes, header: bytes
    ) -> CachedArtifact:
        folder = self.folder(artifact_id)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "header.bin", header)
        vocabulary = self._vocabulary(folder, header)
        _write(folder / "manifest.json", manifest_bytes)
        return CachedArtifact(manifest, vocabulary)

    def _vocabulary(self, folder: Path, header: bytes) -> Path:
        path = folder / "vocabulary.gguf"
        if not path.is_file():
            _write(path, vocabulary_gguf(header))
        return path


class _Fetch:
    """One artifact's pieces from several sources. A peer that failed once is not asked again."""

    def __init__(
        self,
        folder: Path,
        artifact_id: ArtifactId,
        sources: Sequence[Source],
        reader: PieceReader,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._folder = folder
        self._artifact_id = artifact_id
        self._sources = list(sources)
        self._reader = reader
        self._on_progress = on_progress
        self._failures: list[str] = []

    async def piece(self, request: PieceRequest, good: Callable[[bytes], bool]) -> bytes:
        part = _Part(self._folder / f"{pb.ArtifactPiece.Name(request.piece).lower()}.part")
        while self._sources:
            source = self._sources[0]
            resumed = part.size > 0
            try:
                await self._read(source, request, part)
                data = part.read()
                if good(data):
                    part.remove()
                    return data
                part.remove()
                if resumed:
                    continue  # the beginning may be another peer's: ask this one for all of it
                raise ProtocolError(f"peer {source.peer_id} sent wrong bytes", source.peer_id)
            except PeerFailed as error:
                # what a peer says of itself is told when nobody else has it
                level = logging.INFO if error.code else logging.WARNING
                logger.log(level, "metadata of %s: %s; the next peer is asked", self._artifact_id[:12], error)
                self._failures.append(str(error).partition("; ")[0])
                self._sources.pop(0)
        raise PeerFailed(self._story())

    async def _read(self, source: Source, request: PieceRequest, part: _Part) -> None:
        total = -1
        async for total, data in self._reader.parts(source, request, part.size):
            if total > request.limit_bytes or part.size + len(data) > total:
                raise ProtocolError(
                    f"peer {source.peer_id} announced {total} bytes, at most {request.limit_bytes} are right",
                    source.peer_id,
                )
            part.append(data)
            if self._on_progress:
                self._on_progress(part.size, total)
        if part.size != total:
            raise PeerFailed(f"peer {source.peer_id} sent {part.size} of {total} bytes", source.peer_id)

    def _story(self) -> str:
        tried = ", ".join(self._failures) or "no peer offers it"
        return (
            f"the tokenizer of artifact {self._artifact_id[:12]}… could not be fetched ({tried}); "
            "try again, or join through another peer with --initial-peers"
        )


class _Part:
    """Bytes fetched so far; they survive this process, so the next one resumes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def size(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0

    def append(self, data: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(data)

    def read(self) -> bytes:
        return self._path.read_bytes() if self._path.is_file() else b""

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _is_manifest(data: bytes, artifact_id: ArtifactId) -> bool:
    try:
        Manifest.from_json(data, artifact_id)
    except ArtifactError:
        return False
    return True


def _header_matches(data: bytes, manifest: Manifest) -> bool:
    try:
        check_header(data, manifest)
    except ArtifactMismatch:
        return False
    return True


@asynccontextmanager
async def _locked(folder: Path) -> AsyncIterator[None]:
    """One process fetches an artifact; the others wait and find it in the cache."""
    with _lock_file(folder) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_POLL_SECONDS)
        yield


def _lock_file(folder: Path) -> IO[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / ".lock").open("w")


def _write(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

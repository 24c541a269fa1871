"""How the files of an artifact are cut into pieces, the unit in which they are fetched, checked and freed.

The cut follows from the manifest alone, so that two machines with the same manifest mean the same by a piece, and its
digest on one can be compared with that on the other. A file's pieces tile it: the header first, then each tensor from
its own start. The padding after a tensor comes and goes with the piece before it, but no digest covers it: nothing
reads it, so it is nobody's content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from swarm.artifact.manifest import Manifest, TensorEntry
from swarm.errors import ArtifactError

PIECE_BYTES = 4 << 20
DIGEST_BYTES = 32
_MAX_PADDING = 1 << 20  # the largest alignment that GGUF knows
_MAX_PIECES = 1 << 22  # 16 TiB, with 128 MiB of digests; GLM-5.2 has 52,000


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of file number ``file``, the last ``padding`` of which are not hashed. ``index`` counts
    within the file. ``tensor`` is empty for a header, and for what a file has behind its last tensor."""

    file: int
    index: int
    start: int
    stop: int
    tensor: str = ""
    padding: int = 0

    @property
    def bytes(self) -> int:
        return self.stop - self.start


class _Section(NamedTuple):
    """A header, a tensor or a gap, whose pieces are numbered from ``first`` on."""

    tensor: str
    first: int
    start: int
    content_stop: int
    stop: int

    @property
    def n_pieces(self) -> int:
        return -(-(self.content_stop - self.start) // PIECE_BYTES)


class PieceTable:
    """The pieces of a manifest's files. Keeps a few numbers per tensor; pieces are made when asked for, because a span
    needs few of them."""

    def __init__(self, manifest: Manifest) -> None:
        """Raises ``ArtifactError`` for a manifest of more bytes than any model has."""
        if manifest.size_bytes // PIECE_BYTES + len(manifest.tensors) > _MAX_PIECES:
            raise ArtifactError(f"{manifest.name}: {manifest.size_bytes} bytes are no model's; get the right manifest")
        self.manifest = manifest
        self._sections = tuple(_sections(manifest))
        self._of_tensor = {
            section.tensor: (file, section)
            for file, sections in enumerate(self._sections)
            for section in sections
            if section.tensor
        }

    @property
    def n_files(self) -> int:
        return len(self._sections)

    def n_pieces(self, file: int) -> int:
        last = self._sections[file][-1]
        return last.first + last.n_pieces

    def of_file(self, file: int) -> tuple[Piece, ...]:
        return tuple(piece for section in self._sections[file] for piece in _pieces(file, section))

    def headers(self) -> tuple[Piece, ...]:
        """Of all files: the engine reads them whatever its span is."""
        return tuple(piece for file, sections in enumerate(self._sections) for piece in _pieces(file, sections[0]))

    def of_tensor(self, name: str) -> tuple[Piece, ...]:
        """Raises ``KeyError`` for a tensor that the manifest does not have."""
        return tuple(_pieces(*self._of_tensor[name]))

    def of_span(self, first: int, last: int, mtp: bool = False) -> tuple[Piece, ...]:
        """What a node needs for layers [first, last): all headers, then the tensors in file order."""
        tensors = self.manifest.span_tensors(first, last, mtp=mtp)
        return (*self.headers(), *(piece for tensor in tensors for piece in self.of_tensor(tensor.name)))


def piece_digest(piece: Piece, data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 of the piece's content. ``data`` is all of it, padding included."""
    return sha256(memoryview(data)[: piece.bytes - piece.padding]).digest()


def tensor_digest(digests: Iterable[bytes]) -> str:
    """Of a tensor, from those of its pieces in order: hex."""
    return sha256(b"".join(digests)).hexdigest()


def _sections(manifest: Manifest) -> Iterator[tuple[_Section, ...]]:
    tensors: list[list[TensorEntry]] = [[] for _ in manifest.files]
    for tensor in sorted(manifest.tensors, key=lambda tensor: tensor.offset):
        tensors[tensor.file].append(tensor)
    for file, own in zip(manifest.files, tensors, strict=True):
        yield tuple(_of_file(file.header_bytes, own, file.size_bytes))


def _of_file(header_bytes: int, tensors: Sequence[TensorEntry], size: int) -> Iterator[_Section]:
    stops = [*(tensor.offset for tensor in tensors), size]
    section = _Section("", 0, 0, header_bytes, header_bytes)
    yield section
    for tensor, stop in zip(tensors, stops[1:], strict=True):
        end = tensor.offset + tensor.bytes
        is_padding = stop - end <= _MAX_PADDING
        section = _Section(
            tensor.name, section.first + section.n_pieces, tensor.offset, end, stop if is_padding else end
        )
        yield section
        if not is_padding:  # a file may go on behind its last tensor
            section = _Section("", section.first + section.n_pieces, end, stop, stop)
            yield section


def _pieces(file: int, section: _Section) -> Iterator[Piece]:
    last = section.n_pieces - 1
    for number in range(last):
        start = section.start + number * PIECE_BYTES
        yield Piece(file, section.first + number, start, start + PIECE_BYTES, section.tensor)
    start, padding = section.start + last * PIECE_BYTES, section.stop - section.content_stop
    yield Piece(file, section.first + last, start, section.stop, section.tensor, padding)

"""The header of a GGUF file: metadata and tensor table.

Everything is checked against the bytes that are there before it is allocated, as strictly as llama.cpp does, so that a
damaged file is refused here with its name and not in the engine.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct, calcsize
from struct import error as StructError  # noqa: N812 - the module's name for it says nothing

from swarm.artifact import ggml_types
from swarm.artifact.metadata import GgufArray, Metadata, Value
from swarm.errors import NotAModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the same layout
MAX_HEADER_BYTES = 256 << 20  # GLM-5.2's is 9.4 MB
MAX_TENSORS = 1 << 16
MAX_PAIRS = 1 << 12  # models have fewer than 200
MAX_FILES = 1 << 10
MAX_NAME_BYTES = 63  # GGML_MAX_NAME holds a closing zero
MAX_DIMS = 4
MAX_ELEMENTS = (1 << 63) - 1
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
SPLIT_PREFIX = "split."

_FIRST_READ_BYTES = 16 << 20
AGAIN = "download it again"

_U32 = Struct("<I")
_U64 = Struct("<Q")
_HEAD = Struct("<4sIQQ")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of one file. ``offset`` counts from the start of the file; ``dims`` has the row first."""

    name: str
    offset: int
    bytes: int
    type: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvSlice:
    """Where one key-value pair lies in the header."""

    key: str
    start: int
    end: int


@dataclass(frozen=True)
class FileHeader:
    """One file's header. ``raw`` runs from the magic to the first byte of tensor data, padding included; a file without
    tensors is all header."""

    metadata: Metadata
    pairs: tuple[KvSlice, ...] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    raw: bytes = field(repr=False)

    @property
    def header_bytes(self) -> int:
        return len(self.raw)


@dataclass(frozen=True)
class GgufFile:
    """One file of an artifact, opened."""

    path: Path
    size_bytes: int
    header: FileHeader


class _EndOfData(Exception):
    """The header goes on beyond the bytes given."""


class _Damaged(Exception):
    """The header makes no sense; the text says where."""


def read_file(path: Path) -> GgufFile:
    """Reads one file's header and checks that no tensor ends beyond the file."""
    file = read_header(path)
    for tensor in file.header.tensors:
        if tensor.offset + tensor.bytes > file.size_bytes:
            raise NotAModel(
                f"{path}: truncated: tensor {tensor.name} ends at byte {tensor.offset + tensor.bytes} and the file "
                f"has {file.size_bytes}; {AGAIN}"
            )
    return file


def read_header(path: Path) -> GgufFile:
    """Reads one file's header; its tensors may be cut off."""
    size = _regular_size(path)
    limit = min(size, MAX_HEADER_BYTES)
    wanted = min(limit, _FIRST_READ_BYTES)
    try:
        with path.open("rb") as stream:
            data = stream.read(wanted)
            while (header := _try_parse(data, path.name, complete=wanted >= size)) is None:
                if wanted >= limit:
                    raise NotAModel(f"{path}: its header is larger than {MAX_HEADER_BYTES >> 20} MiB; {AGAIN}")
                more = min(limit, wanted * 4)
                data += stream.read(more - wanted)
                wanted = more
    except OSError as error:
        raise NotAModel(f"{path}: can't be read ({error.strerror}); check its permissions") from error
    return GgufFile(path, size, header)


def parse_header(data: bytes, name: str) -> FileHeader:
    """Parses a header held in memory; ``name`` is for error texts. Tensor data need not be there."""
    header = _try_parse(data, name, complete=True)
    assert header is not None  # complete data parses or raises
    return header


def _try_parse(data: bytes, name: str, *, complete: bool) -> FileHeader | None:
    """None when ``data`` ends inside the header and is not all there is."""
    try:
        return _Parser(data, name).parse(complete=complete)
    except _EndOfData:
        if not complete:
            return None
        raise NotAModel(f"{name}: truncated: it ends inside the header, at byte {len(data)}; {AGAIN}") from None
    except _Damaged as error:
        raise NotAModel(f"{name}: {error}; {AGAIN}") from None


class _Parser:
    """Walks through a header once. ``at`` is the position of the next byte."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data = data
        self.name = name
        self.at = 0

    def parse(self, *, complete: bool) -> FileHeader:
        n_tensors, n_pairs = self._head()
        pairs: list[KvSlice] = []
        values: dict[str, Value] = {}
        for _ in range(n_pairs):
            start = self.at
            key, value = self._pair()
            if key in values:
                raise _Damaged(f"metadata key {key} comes twice")
            values[key] = value
            pairs.append(KvSlice(key, start, self.at))
        alignment = _alignment(values)
        table = [self._tensor() for _ in range(n_tensors)]
        start = _padded(self.at, alignment)
        tensors = _placed(table, start, alignment)
        end = start if tensors else len(self.data)
        if end > len(self.data) or not (tensors or complete):
            raise _EndOfData
        return FileHeader(Metadata(self.name, values), tuple(pairs), tensors, self.data[:end])

    def _head(self) -> tuple[int, int]:
        if self.data[:4] != MAGIC[: len(self.data)] or not self.data:
            raise _Damaged("not a GGUF model (it does not start with GGUF)")
        _, version, n_tensors, n_pairs = self._unpack(_HEAD)
        if version & 0xFFFF == 0 and version:
            raise _Damaged("a big-endian GGUF, which this program can't use")
        if version not in VERSIONS:
            raise _Damaged(f"GGUF version {version}, but this program reads {VERSIONS[0]} and {VERSIONS[1]}")
        if n_tensors > MAX_TENSORS:
            raise _Damaged(f"damaged: it claims {n_tensors} tensors")
        if n_pairs > MAX_PAIRS:
            raise _Damaged(f"damaged: it claims {n_pairs} metadata keys, more than the {MAX_PAIRS} this program reads")
        return n_tensors, n_pairs

    def _pair(self) -> tuple[str, Value]:
        key = self._name("a metadata key", 1 << 16)
        (kind,) = self._unpack(_U32)
        if kind == _ARRAY:
            return key, self._array(key)
        if kind == _STRING:
            return key, self._string().decode("utf-8", "replace")
        if kind not in _SCALARS:
            raise _Damaged(f"damaged: metadata key {key} has type {kind}, which does not exist")
        return key, self._unpack(Struct("<" + _SCALARS[kind]))[0]

    def _array(self, key: str) -> GgufArray:
        (kind,) = self._unpack(_U32)
        (count,) = self._unpack(_U64)
        start = self.at
        if kind == _STRING:
            self._skip_strings(count)
            return GgufArray(None, count, self.data[start : self.at])
        if kind not in _SCALARS:
            raise _Damaged(f"damaged: metadata key {key} is an array of type {kind}, which does not exist")
        self._skip(count * calcsize("<" + _SCALARS[kind]))
        return GgufArray(_SCALARS[kind], count, self.data[start : self.at])

    def _skip_strings(self, count: int) -> None:
        # GLM-5.2 has 476,000 strings: this loop is the whole time of parsing it
        data, at, end, unpack = self.data, self.at, len(self.data), _U64.unpack_from
        if count * _U64.size > end - at:
            raise _EndOfData
        try:
            for _ in range(count):
                at += _U64.size + unpack(data, at)[0]
        except (StructError, OverflowError):
            raise _EndOfData from None
        if at > end:
            raise _EndOfData
        self.at = at

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self._name("a tensor name", MAX_NAME_BYTES)
        (n_dims,) = self._unpack(_U32)
        if n_dims > MAX_DIMS:
            raise _Damaged(f"damaged: tensor {name} has {n_dims} dimensions")
        dims = self._unpack(Struct(f"<{n_dims}Q"))
        number, offset = self._unpack(Struct("<IQ"))
        kind = ggml_types.type_name(number)
        if kind is None:
            raise _Damaged(f"tensor {name} has the unknown type {number}: damaged, or newer than this program")
        _check_dims(name, kind, dims)
        return name, kind, dims, offset

    def _name(self, what: str, limit: int) -> str:
        raw = self._string()
        try:
            text = raw.decode("utf-8") if 0 < len(raw) <= limit else ""
        except UnicodeDecodeError:
            text = ""
        if not text.isprintable() or not text:
            raise _Damaged(f"damaged: {what} at byte {self.at - len(raw)} can't be read")
        return text

    def _string(self) -> bytes:
        (length,) = self._unpack(_U64)
        start = self.at
        self._skip(length)
        return self.data[start : self.at]

    def _unpack(self, layout: Struct) -> tuple[int, ...]:
        start = self.at
        self._skip(layout.size)
        return layout.unpack_from(self.data, start)

    def _skip(self, n: int) -> None:
        if n > len(self.data) - self.at:
            raise _EndOfData
        self.at += n


def _alignment(values: dict[str, Value]) -> int:
    value = values.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1 << 20 or value & (value - 1):
        raise _Damaged(f"damaged: {ALIGNMENT_KEY} is not a power of two")
    return value


def _check_dims(name: str, kind: str, dims: Sequence[int]) -> None:
    elements = 1
    for dim in dims:
        elements *= dim
        if not 0 < dim <= MAX_ELEMENTS or elements > MAX_ELEMENTS:
            raise _Damaged(f"damaged: tensor {name} has an impossible shape")
    block = ggml_types.block_elements(kind)
    if (dims[0] if dims else 1) % block:
        raise _Damaged(f"damaged: tensor {name} of type {kind} has rows that are no multiple of {block}")


def _placed(
    table: Sequence[tuple[str, str, tuple[int, ...], int]], data_start: int, alignment: int
) -> tuple[TensorInfo, ...]:
    """Tensors lie one behind another, each padded: llama.cpp refuses anything else."""
    expected = 0
    placed: dict[str, TensorInfo] = {}
    for name, kind, dims, offset in table:
        if name in placed:
            raise _Damaged(f"damaged: tensor {name} comes twice")
        if offset != expected:
            raise _Damaged(f"damaged: tensor {name} lies at {offset}, not at {expected}")
        size = ggml_types.tensor_bytes(kind, dims)
        placed[name] = TensorInfo(name, data_start + offset, size, kind, dims)
        expected += _padded(size, alignment)
    return tuple(placed.values())


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _regular_size(path: Path) -> int:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise NotAModel(f"{path}: no such model file; check the path, or download the model") from None
    except (OSError, ValueError) as error:
        raise NotAModel(f"{path}: can't be opened ({error}); check the path") from error
    if stat.S_ISDIR(status.st_mode):
        raise NotAModel(f"{path}: a folder, not a model file; name the .gguf file in it")
    if not stat.S_ISREG(status.st_mode):
        raise NotAModel(f"{path}: not a regular file; name a .gguf file")
    if status.st_size == 0:
        raise NotAModel(f"{path}: empty, not a GGUF model; {AGAIN}")
    return status.st_size

"""A model of random bytes, of which only the sizes and places make sense, and processes that store parts of it."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path

from swarm.artifact.catalog import KNOWN
from swarm.artifact.manifest import FileEntry, Manifest, TensorEntry
from swarm.errors import StoreError
from swarm.store.partial_copy import PartialCopy
from swarm.store.pieces import Piece, piece_digest

HEADERS = (700, 33, 32)
PADDED = 32


@dataclass(frozen=True)
class Sample:
    """``sizes`` are those of the tensors; they are dealt to the second and the third file in turn."""

    sizes: tuple[int, ...]
    seed: int = 0

    @cached_property
    def manifest(self) -> Manifest:
        stops, tensors = list(HEADERS), []
        for number, size in enumerate(self.sizes):
            file = 1 + number % 2
            tensors.append(TensorEntry(f"blk.{number}.w", file, stops[file], size, "F32", (size // 4,)))
            stops[file] += -(-size // PADDED) * PADDED
        files = zip(HEADERS, stops, strict=True)
        return replace(
            KNOWN["glm-tiny"].manifest,
            name="sample",
            files=tuple(
                FileEntry(f"sample-{number}.gguf", size, "0" * 64, header)
                for number, (header, size) in enumerate(files, 1)
            ),
            tensors=tuple(sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset))),
        )

    @cached_property
    def files(self) -> tuple[bytes, ...]:
        source = random.Random(self.seed)
        return tuple(source.randbytes(file.size_bytes) for file in self.manifest.files)

    def data(self, piece: Piece) -> memoryview:
        return memoryview(self.files[piece.file])[piece.start : piece.stop]


SMALL = Sample((4096, 10_000, 24, 60_000, 4, 33_332, 8192, 100_000) * 4)


def every_piece(copy: PartialCopy) -> tuple[Piece, ...]:
    return tuple(piece for file in range(copy.table.n_files) for piece in copy.table.of_file(file))


def fill(copy: PartialCopy, sample: Sample, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        copy.write(piece, sample.data(piece))
    copy.commit()


def wrong(copy: PartialCopy, sample: Sample) -> list[Piece]:
    """Pieces that count as here, and are not what they should be on the disk, or by their digest."""
    held = [piece for piece in every_piece(copy) if copy.has(piece)]
    return [
        piece
        for piece in held
        if copy.digest(piece) != piece_digest(piece, sample.data(piece))
        or piece_digest(piece, copy.read(piece)) != copy.digest(piece)
    ]


def store_until_killed(folder: Path, sample: Sample, seed: int, events: Connection) -> None:
    """Says a byte before and after each thing it does. Writes in any order, writes again, frees and commits."""
    chance = random.Random(seed)
    with PartialCopy.open(folder, sample.manifest) as copy:
        pieces = list(every_piece(copy))
        while missing := list(copy.missing(pieces)):
            for piece in chance.sample(missing, min(len(missing), 8)):
                events.send_bytes(b"w")
                copy.write(piece, sample.data(piece))
            if chance.random() < 0.5:
                _again(copy, sample, chance.choice(pieces), events)
            events.send_bytes(b"c")
            copy.commit()
            if chance.random() < 0.5:
                _again(copy, sample, chance.choice(pieces), events)
            if chance.random() < 0.1:
                events.send_bytes(b"f")
                copy.free([chance.choice(pieces)])
        events.send_bytes(b"e")


def _again(copy: PartialCopy, sample: Sample, piece: Piece, events: Connection) -> None:
    """As when its bytes are wrong, which they are for a while."""
    copy.write(piece, bytes(piece.bytes))
    events.send_bytes(b"a")
    time.sleep(0.001)  # to be killed in
    copy.write(piece, sample.data(piece))


def hold(folder: Path, sample: Sample, events: Connection) -> None:
    """Keeps the folder open until the other end is closed."""
    with PartialCopy.open(folder, sample.manifest):
        events.send_bytes(b"o")
        with suppress(EOFError):
            events.recv_bytes()


def store_under_limit(folder: Path, sample: Sample, limit_bytes: int, events: Connection) -> None:
    """Says what storing everything ends with when no file may be longer than that."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    with PartialCopy.open(folder, sample.manifest) as copy:
        for act in (copy.check_room, partial(fill, copy, sample)):
            try:
                act(every_piece(copy))
                events.send_bytes(b"stored")
            except StoreError as error:
                events.send_bytes(str(error).encode())

"""What a hop computed for its successor, kept so that another successor can be fed again.

Rows stay in memory up to a budget that all sessions of the node share, and go to an unlinked file of the session beyond
it. When the file can't grow, the journal forgets everything and begins anew: a replay then starts one hop earlier, but
no session ends for it.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from swarm.protocol import Activations
from swarm.replay import Piece, Replay, Slice, Track

logger = logging.getLogger(__name__)

VALUE_BYTES = 4


@dataclass(frozen=True)
class Spilled:
    """Rows in the session's file: f32 [n, width] from ``offset`` on."""

    offset: int
    shape: tuple[int, int]

    @property
    def n_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * VALUE_BYTES


Rows: TypeAlias = Activations | Spilled


@dataclass(frozen=True)
class Push:
    """One step to be sent to a successor again."""

    start: int
    chunk: bool
    rows: Activations


class SpillFile:
    """A file without a name: nothing is left of it when the process ends, however it ends. Raises OSError.

    Reads and writes block for as long as the page cache lets them; a decode row is 24 KiB, a chunk 12 MB at most.
    """

    def __init__(self, folder: Path, reserve_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _unnamed(folder)
        self._reserve_bytes = reserve_bytes
        self.n_bytes = 0

    def append(self, rows: Activations) -> Spilled:
        data = rows.reshape(-1).view(np.uint8).data
        self._check_room(len(data))
        offset = at = self.n_bytes
        while data:
            written = os.pwrite(self._file, data, at)
            at, data = at + written, data[written:]
        self.n_bytes = at
        return Spilled(offset, (rows.shape[0], rows.shape[1]))

    def read(self, spilled: Spilled, first: int, last: int) -> Activations:
        width = spilled.shape[1]
        rows = np.empty((last - first, width), np.float32)
        data, at = rows.reshape(-1).view(np.uint8).data, spilled.offset + first * width * VALUE_BYTES
        while data:
            n_read = os.preadv(self._file, [data], at)
            if not n_read:
                raise OSError(errno.EIO, "the journal's file ends too early")
            at, data = at + n_read, data[n_read:]
        return rows

    def cut(self, n_bytes: int) -> None:
        """Gives the room beyond back."""
        self.n_bytes = n_bytes
        os.ftruncate(self._file, n_bytes)

    def close(self) -> None:
        os.close(self._file)

    def _check_room(self, n_bytes: int) -> None:
        system = os.fstatvfs(self._file)
        if system.f_bavail * system.f_frsize < n_bytes + self._reserve_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _unnamed(folder: Path) -> int:
    with suppress(OSError, AttributeError):  # some file systems can't, some systems don't know it
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    file, name = tempfile.mkstemp(dir=folder)
    Path(name).unlink()
    return file


@dataclass
class JournalStore:
    """What the journals of a node share. ``disk_reserve_bytes`` are left free for others."""

    memory_bytes: int
    folder: Path
    disk_reserve_bytes: int = 0
    used_bytes: int = 0
    spilled_bytes: int = 0
    n_open: int = 0

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.used_bytes

    def open(self) -> Journal:
        self.n_open += 1
        return Journal(self)


class Journal:
    """Of one session. ``close`` gives everything back; after that nothing is recorded and nothing covered."""

    def __init__(self, store: JournalStore) -> None:
        self._store = store
        self._track: Track[Rows] = Track()
        self._file: SpillFile | None = None
        self.closed = False

    @property
    def first(self) -> int:
        """The earliest start it can push from."""
        return self._track.first

    @property
    def end(self) -> int:
        """The position it leads to."""
        return self._track.end

    def record(self, start: int, rows: Activations, *, chunk: bool) -> None:
        """Takes a copy. What it knows at or above ``start`` is replaced."""
        if self.closed:
            return
        self.truncate(start)
        try:
            kept = self._keep(rows)
        except OSError as error:
            logger.warning("a session's journal can't be kept (%s); it begins anew", error.strerror)
            self._forget(self._track.clear())
            self._track.truncate(start)
            self._drop_file()
            return
        self._forget(self._track.append(start, len(rows), chunk=chunk, content=kept))

    def truncate(self, position: int) -> None:
        self._forget(self._track.truncate(position))

    def covers(self, first: int, position: int) -> bool:
        """Whether it holds what a hop computed for positions [first, position)."""
        return first >= position or (not self.closed and self._track.end >= position and self._track.covers(first))

    def pushes(self, first: int, most_rows: int) -> Iterator[Push]:
        """The steps that lead a successor from ``first`` to the end; it ends early when the journal is closed. Raises
        OSError."""
        for replay in self._track.replay(first, most_rows):
            if self.closed:
                return
            yield Push(replay.start, replay.chunk, self._rows(replay))

    def close(self) -> None:
        if not self.closed:
            self._forget(self._track.clear())
            self._drop_file()
            self.closed = True
            self._store.n_open -= 1

    def _keep(self, rows: Activations) -> Rows:
        if rows.nbytes <= self._store.free_bytes:
            self._store.used_bytes += rows.nbytes
            return rows.copy()
        if self._file is None:
            self._file = SpillFile(self._store.folder, self._store.disk_reserve_bytes)
        spilled = self._file.append(np.ascontiguousarray(rows))
        self._store.spilled_bytes += spilled.n_bytes
        return spilled

    def _rows(self, replay: Replay[Rows]) -> Activations:
        parts = [self._read(part) for part in replay.slices]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, part: Slice[Rows]) -> Activations:
        if isinstance(part.content, Spilled):
            if self._file is None:
                raise OSError(errno.ENOENT, "the journal was begun anew while it was read")
            return self._file.read(part.content, part.first, part.last)
        return part.content[part.first : part.last]

    def _forget(self, dropped: list[Piece[Rows]]) -> None:
        """Pieces leave as a stack, so that the file is cut at its end."""
        cut = None
        for piece in dropped:
            if isinstance(piece.content, Spilled):
                self._store.spilled_bytes -= piece.content.n_bytes
                cut = piece.content.offset
            else:
                self._store.used_bytes -= piece.content.nbytes
        if cut is not None and self._file is not None:
            self._file.cut(cut)

    def _drop_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

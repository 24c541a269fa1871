"""What a span is digested to, and the digests of a file's tensors while it is read.

A tensor is digested from the digests of its pieces (``swarm.store.pieces``), so that one that is fetched or read again
is checked alone. The root of a span stands for all of its tensors: two nodes with the same layers and the same root
hold the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256

from swarm.store.pieces import Piece, tensor_digest


def span_root(tensors: Mapping[str, str]) -> str:
    """In hex, of the digests of a span's tensors by name."""
    return sha256("".join(f"{name} {digest}\n" for name, digest in sorted(tensors.items())).encode()).hexdigest()


class FileDigester:
    """Takes a file's bytes as they are read, from the start on, and gives the digests of its tensors. ``pieces`` are
    the file's, in order."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        own = [piece for piece in pieces if piece.tensor]
        self._left = own[::-1]
        self._at = 0
        self._hash = sha256()
        self._digests: dict[str, list[bytes]] = {piece.tensor: [] for piece in own}

    def update(self, data: bytes) -> None:
        view, begin = memoryview(data), self._at
        self._at += len(data)
        while self._left and self._left[-1].start < self._at:
            piece = self._left[-1]
            stop = piece.stop - piece.padding
            self._hash.update(view[max(0, piece.start - begin) : stop - begin])
            if self._at < stop:
                return
            self._digests[piece.tensor].append(self._hash.digest())
            self._hash = sha256()
            self._left.pop()

    def tensors(self) -> dict[str, str]:
        """In hex by name; without those of which bytes are missing at the end."""
        unread = {piece.tensor for piece in self._left}
        return {name: tensor_digest(pieces) for name, pieces in self._digests.items() if name not in unread}

"""Bytes of tokens to text: a token may end in the middle of a character."""

from __future__ import annotations

import codecs


class Utf8Stream:
    """Decodes byte by byte what ``bytes.decode("utf-8", "replace")`` would decode at once.

    An unfinished character is held back until its bytes have come; ``flush`` gives it up as U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", True)

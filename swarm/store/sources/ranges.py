"""What an HTTP answer to a range request must say, and why it is refused. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

OK = 206
_WHOLE = 200
_DENIED = (401, 403)
_GONE = (404, 410)
_TOO_FAR = 416
_BUSY = (408, 425, 429)
_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\s*", re.ASCII | re.IGNORECASE)
_OTHER_SERVER = "choose another --source"


@dataclass(frozen=True)
class Asked:
    """Bytes [start, stop) of a file of ``size_bytes``, which had this strong ``etag`` before, if any."""

    start: int
    stop: int
    size_bytes: int
    etag: str | None = None

    @property
    def header(self) -> str:
        return f"bytes={self.start}-{self.stop - 1}"


def is_busy(status: int) -> bool:
    """Whether the same request may be answered later."""
    return status in _BUSY or status >= 500


def status_refusal(status: int, asked: Asked) -> str:
    """Why this status is refused, and what to do; empty for the right one."""
    if status == OK:
        return ""
    if status == _WHOLE:
        return f"ignores ranges: it sends the whole file where some bytes of it were asked for; {_OTHER_SERVER}"
    if status in _DENIED:
        return f"access is denied (status {status}); check the address and the token or password"
    if status in _GONE:
        return f"is not there (status {status}); the source must have every file of the model, {_OTHER_SERVER}"
    if status == _TOO_FAR:
        return f"another file: it ends before byte {asked.stop}, and should have {asked.size_bytes}; {_OTHER_SERVER}"
    return f"answers with status {status}; check the address, or {_OTHER_SERVER}"


def headers_refusal(headers: Mapping[str, str], asked: Asked) -> str:
    """Why an answer with the right status is refused, and what to do; empty for a right one."""
    text = headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None:
        return f"does not say which bytes it sends (Content-Range: {text[:40]!r}); {_OTHER_SERVER}"
    first, last, total = int(match[1]), int(match[2]), match[3]
    if total != str(asked.size_bytes):
        found = "does not say how long the file is" if total == "*" else f"another file: it has {total} bytes"
        return f"{found}, and should have {asked.size_bytes}; {_OTHER_SERVER}"
    if (first, last + 1) != (asked.start, asked.stop):
        return f"sends bytes {first}-{last} where {asked.start}-{asked.stop - 1} were asked for; {_OTHER_SERVER}"
    length = headers.get("Content-Length")
    if length is not None and length != str(asked.stop - asked.start):
        return f"announces {length[:20]} bytes for a range of {asked.stop - asked.start}; {_OTHER_SERVER}"
    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        return f"sends bytes encoded with {encoding[:20]}, so ranges of them are of no use; {_OTHER_SERVER}"
    etag = strong_etag(headers)
    if asked.etag is not None and etag is not None and etag != asked.etag:
        return (
            "has changed on the server since the first request (its ETag is another); fetch again when it is complete"
        )
    return ""


def strong_etag(headers: Mapping[str, str]) -> str | None:
    """None for a weak one: it may stay while bytes change."""
    etag = headers.get("ETag", "").strip()
    return etag if etag.startswith('"') else None


def retry_after_seconds(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds from a number or a date; None without either."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", text, re.ASCII):
        return float(text)
    try:
        then = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # the second for a time zone beyond all bounds
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return max(0.0, (then - (now or datetime.now(UTC))).total_seconds())

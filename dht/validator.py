"""What hivemind asks before it stores or returns an entry: ``dht.envelope.check`` in hivemind's terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgpack  # type: ignore[import-untyped]  # what hivemind packs with
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from dht.envelope import MAX_SEALED_BYTES, Envelope, check
from dht.errors import RecordRejected, Rejection

_T = TypeVar("_T")
_PLAIN_SUBKEY = msgpack.packb(None)  # hivemind's mark of a value without subkeys


class EnvelopeValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Lets signed entries of dictionaries pass, nothing else. ``rejected`` counts the rest by reason."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.rejected: Counter[Rejection] = Counter()

    def validate(self, record: DHTRecord) -> bool:
        try:
            self.check(record)
        except RecordRejected as error:
            self.rejected[error.reason] += 1
            return False
        return True

    def check(self, record: DHTRecord) -> Envelope:
        """Raises RecordRejected."""
        if record.subkey == _PLAIN_SUBKEY:
            raise RecordRejected(Rejection.PLAIN_VALUE)
        subkey = _unpacked(record.subkey, str, Rejection.WRONG_SUBKEY)
        if not isinstance(record.value, bytes):
            raise RecordRejected(Rejection.MALFORMED)
        if len(record.value) > MAX_SEALED_BYTES + 8:
            raise RecordRejected(Rejection.TOO_LARGE, f"{len(record.value)} bytes")
        sealed = _unpacked(record.value, bytes, Rejection.MALFORMED)
        if not isinstance(record.expiration_time, float | int):
            raise RecordRejected(Rejection.MALFORMED)
        return check(record.key, subkey, sealed, float(record.expiration_time), self._clock())

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return False


def _unpacked(data: bytes, kind: type[_T], reason: Rejection) -> _T:
    """hivemind wraps each value and subkey in msgpack. Limits are off for everything that is no plain scalar."""
    try:
        value = msgpack.unpackb(data, raw=False, max_array_len=0, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise RecordRejected(reason) from error
    if type(value) is not kind:
        raise RecordRejected(reason)
    return value

"""The signed form of an entry in the DHT.

    magic "GSE1" | kind u8 | segment u16 | artifact id 32 bytes | signature 64 bytes | payload, JSON

The signature covers key hash, subkey, expiry and everything else, so an entry can't be moved, prolonged or given to
somebody else. What storing nodes check (``check``) needs no look into the payload: a node stores records of a newer
schema, too. ``open_span`` and ``open_listing`` are for readers.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from dht.errors import RecordRejected, Rejection
from dht.identity import Identity
from dht.keys import ARTIFACTS_KEY, key_hash, segment_key
from dht.listing import LISTING_VERSION, ArtifactEntry
from dht.peer_id import MAX_CHARS
from dht.record import RECORD_VERSION, SpanRecord

MAX_LIFE_SECONDS = 600.0
CLOCK_TOLERANCE_SECONDS = 3.0
MAX_SEALED_BYTES = 4096

_MAGIC = b"GSE1"
_HEADER = struct.Struct(">4sBH32s")
_SIGNATURE_BYTES = 64
_BODY_START = _HEADER.size + _SIGNATURE_BYTES
_CONTEXT = b"glm-swarm dht entry 1\0"  # what else this key signs can't be taken for an entry


class Kind(IntEnum):
    SPAN = 1
    GONE = 2  # takes back a span: a DHT keeps the entry that expires last, so nothing can be deleted
    LISTING = 3


@dataclass(frozen=True)
class Place:
    """What an entry is about; with it goes the key it belongs under."""

    kind: Kind
    artifact_id: str  # 64 hex digits
    segment: int  # first layer of the cut segment; 0 for a listing

    @property
    def key(self) -> str:
        return ARTIFACTS_KEY if self.kind is Kind.LISTING else segment_key(self.artifact_id, self.segment)


@dataclass(frozen=True)
class Envelope:
    """An entry whose signature, key, subkey and expiry were found good."""

    place: Place
    peer_id: str
    expires: float
    payload: bytes


def seal(identity: Identity, place: Place, expires: float, payload: bytes) -> bytes:
    header = _HEADER.pack(_MAGIC, place.kind, place.segment, bytes.fromhex(place.artifact_id))
    signature = identity.sign(_signed(key_hash(place.key), identity.peer_id, expires, header, payload))
    sealed = header + signature + payload
    if len(sealed) > MAX_SEALED_BYTES:
        raise ValueError(f"an entry of {len(sealed)} bytes is over the limit of {MAX_SEALED_BYTES}")
    return sealed


def seal_span(identity: Identity, segment: int, expires: float, record: SpanRecord) -> bytes:
    place = Place(Kind.SPAN, record.artifact_id, segment)
    return seal(identity, place, expires, record.model_dump_json().encode())


def seal_gone(identity: Identity, artifact_id: str, segment: int, expires: float) -> bytes:
    return seal(identity, Place(Kind.GONE, artifact_id, segment), expires, b"")


def seal_listing(identity: Identity, expires: float, entry: ArtifactEntry) -> bytes:
    return seal(identity, Place(Kind.LISTING, entry.artifact_id, 0), expires, entry.model_dump_json().encode())


def check(hashed_key: bytes, subkey: str, sealed: bytes, expires: float, now: float) -> Envelope:
    """Raises RecordRejected unless the owner of the peer id ``subkey`` put exactly this here. Cheap checks first."""
    if len(sealed) > MAX_SEALED_BYTES:
        raise RecordRejected(Rejection.TOO_LARGE, f"{len(sealed)} bytes")
    place = _place(sealed)
    if key_hash(place.key) != hashed_key:
        raise RecordRejected(Rejection.WRONG_KEY)
    if len(subkey) > MAX_CHARS:
        raise RecordRejected(Rejection.WRONG_SUBKEY)
    _check_expiry(expires, now)
    header, signature, payload = sealed[: _HEADER.size], sealed[_HEADER.size : _BODY_START], sealed[_BODY_START:]
    if not Identity.verify(subkey, _signed(hashed_key, subkey, expires, header, payload), signature):
        raise RecordRejected(Rejection.BAD_SIGNATURE)
    return Envelope(place, subkey, expires, payload)


def open_span(envelope: Envelope) -> SpanRecord | None:
    """The record, or None when the peer took its span back. Raises RecordRejected."""
    if envelope.place.kind is Kind.GONE:
        return None
    if envelope.place.kind is not Kind.SPAN:
        raise RecordRejected(Rejection.WRONG_KEY, "no span")
    record = _parsed(SpanRecord, envelope.payload, RECORD_VERSION)
    if record.peer_id != envelope.peer_id:
        raise RecordRejected(Rejection.WRONG_SUBKEY)
    if record.artifact_id != envelope.place.artifact_id or not record.first <= envelope.place.segment < record.last:
        raise RecordRejected(Rejection.WRONG_KEY, "the record is about other layers")
    if record.last > record.n_layers:
        raise RecordRejected(Rejection.MALFORMED, "the span ends after the model")
    return record


def open_listing(envelope: Envelope) -> ArtifactEntry:
    """Raises RecordRejected."""
    if envelope.place.kind is not Kind.LISTING:
        raise RecordRejected(Rejection.WRONG_KEY, "no listing")
    entry = _parsed(ArtifactEntry, envelope.payload, LISTING_VERSION)
    if entry.artifact_id != envelope.place.artifact_id:
        raise RecordRejected(Rejection.MALFORMED)
    return entry


def _signed(hashed_key: bytes, subkey: str, expires: float, header: bytes, payload: bytes) -> bytes:
    owner = subkey.encode(errors="replace")
    parts = (_CONTEXT, hashed_key, struct.pack(">dH", expires, len(owner)), owner, header, payload)
    return b"".join(parts)


def _place(sealed: bytes) -> Place:
    if len(sealed) < _BODY_START:
        raise RecordRejected(Rejection.MALFORMED, "too short")
    magic, kind, segment, artifact_id = _HEADER.unpack_from(sealed)
    if magic != _MAGIC:
        raise RecordRejected(Rejection.MALFORMED, "no entry of this program")
    try:
        return Place(Kind(kind), artifact_id.hex(), segment)
    except ValueError:
        raise RecordRejected(Rejection.UNKNOWN_VERSION, f"kind {kind}") from None


def _check_expiry(expires: float, now: float) -> None:
    if not math.isfinite(expires):
        raise RecordRejected(Rejection.MALFORMED, "no expiry")
    if expires <= now:
        raise RecordRejected(Rejection.EXPIRED)
    if expires > now + MAX_LIFE_SECONDS + CLOCK_TOLERANCE_SECONDS:
        raise RecordRejected(Rejection.EXPIRES_TOO_LATE)


_Model = TypeVar("_Model", bound=BaseModel)


def _parsed(model: type[_Model], payload: bytes, known_version: int) -> _Model:
    try:
        parsed = model.model_validate_json(payload)
    except ValidationError as error:
        newer = _version_of(payload) > known_version
        raise RecordRejected(Rejection.UNKNOWN_VERSION if newer else Rejection.MALFORMED) from error
    fields = parsed.model_dump()
    if fields["version"] != known_version:
        raise RecordRejected(Rejection.UNKNOWN_VERSION, f"version {fields['version']}")
    if not _is_printable(fields):
        raise RecordRejected(Rejection.MALFORMED, "control characters")
    return parsed


class _Versioned(BaseModel):
    version: int = 0


def _version_of(payload: bytes) -> int:
    try:
        return _Versioned.model_validate_json(payload).version
    except ValidationError:
        return 0


def _is_printable(value: object) -> bool:
    """Texts of strangers end up in terminals and logs."""
    if isinstance(value, str):
        return value.isprintable()
    if isinstance(value, dict):
        return all(_is_printable(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_printable(item) for item in value)
    return True

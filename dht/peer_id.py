"""Peer ids of Ed25519 keys: base58 of an identity multihash, so the public key can be read out of the id.

https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

from functools import lru_cache

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {letter: value for value, letter in enumerate(_ALPHABET)}
# multihash "identity", 36 bytes; then the PublicKey message: type Ed25519 (1), data of 32 bytes
_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
KEY_BYTES = 32
MAX_CHARS = 64  # ids of other key types are at most this long, too


def encode_base58(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    letters = []
    while number:
        number, digit = divmod(number, 58)
        letters.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(letters))


def decode_base58(text: str) -> bytes:
    """Raises ValueError."""
    number = 0
    for letter in text:
        if letter not in _DIGITS:
            raise ValueError(f"{letter!r} is no base58 digit")
        number = number * 58 + _DIGITS[letter]
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")


def peer_id_of(public_key: bytes) -> str:
    if len(public_key) != KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {KEY_BYTES} bytes, not {len(public_key)}")
    return encode_base58(_PREFIX + public_key)


@lru_cache(maxsize=4096)
def public_key_of(peer_id: str) -> bytes:
    """Raises ValueError for anything but the one spelling of an Ed25519 peer id."""
    if len(peer_id) > MAX_CHARS:
        raise ValueError("a peer id is shorter")
    data = decode_base58(peer_id)
    if not data.startswith(_PREFIX) or len(data) != len(_PREFIX) + KEY_BYTES:
        raise ValueError("no Ed25519 peer id")
    return data[len(_PREFIX) :]


def is_peer_id(text: str) -> bool:
    """True for the ids of every key type: libp2p peers that are no nodes of ours may relay or bootstrap."""
    return 46 <= len(text) <= MAX_CHARS and all(letter in _DIGITS for letter in text)

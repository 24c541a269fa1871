"""What can go wrong between this process and the swarm.

    DhtError
    ├── BadAddress               a text is no usable multiaddr
    ├── BadIdentity              the identity file can't be used
    │   └── IdentityInUse        another process holds it
    ├── NetworkStartFailed       the libp2p daemon did not start
    │   └── ListenFailed         an address can't be listened on
    │       └── PortTaken
    ├── InitialPeersUnreachable  none of them answered
    ├── PeerUnreachable          can't connect, or the peer does not answer
    │   └── StreamRefused        it is there, but does not serve that protocol
    ├── ClockSkewed              this clock and the swarm's differ too much
    └── RecordRejected           an entry of the DHT is forged, expired or malformed

Every message is one line and ends with the next thing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class DhtError(Exception):
    """Base of everything this package raises on purpose."""


class BadAddress(DhtError):
    """A text is no usable multiaddr."""


class BadIdentity(DhtError):
    """The identity file is unreadable, damaged or of another kind."""


class IdentityInUse(BadIdentity):
    """Another process runs under this identity. Two at once would take each other's connections."""


class NetworkStartFailed(DhtError):
    """The libp2p daemon did not start."""


class ListenFailed(NetworkStartFailed):
    """An address can't be listened on."""

    def __init__(self, address: str, reason: str, advice: str) -> None:
        super().__init__(f"can't listen on {address}: {reason}; {advice}")
        self.address = address
        self.reason = reason


class PortTaken(ListenFailed):
    """Another program listens there already."""

    def __init__(self, address: str, port: int) -> None:
        super().__init__(address, f"port {port} is taken", "choose another port, or port 0 for any free one")
        self.port = port


class InitialPeersUnreachable(DhtError):
    """None of the initial peers answered. ``failures`` holds (address, reason)."""

    def __init__(self, failures: Sequence[tuple[str, str]]) -> None:
        tried = "; ".join(f"{address}: {reason}" for address, reason in failures)
        super().__init__(f"no initial peer answered ({tried}); check that one of them runs and that its port is open")
        self.failures = tuple(failures)


class PeerUnreachable(DhtError):
    """Can't connect to a peer, or it does not answer."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(f"peer {peer_id} can't be reached ({reason}); try again, or choose another peer")
        self.peer_id = peer_id
        self.reason = reason


class StreamRefused(PeerUnreachable):
    """The peer is there, but does not serve the protocol asked for."""


class ClockSkewed(DhtError):
    """This clock and the swarm's differ too much. A positive offset means that this clock is behind."""

    def __init__(self, offset_seconds: float, limit_seconds: float) -> None:
        side = "behind" if offset_seconds > 0 else "ahead of"
        super().__init__(
            f"this clock is {abs(offset_seconds):.1f} s {side} the swarm's (limit {limit_seconds:g} s): "
            "set it, for example with timedatectl set-ntp true"
        )
        self.offset_seconds = offset_seconds


class Rejection(StrEnum):
    """Why an entry of the DHT was dropped."""

    MALFORMED = "malformed"
    TOO_LARGE = "too large"
    PLAIN_VALUE = "plain value"
    WRONG_KEY = "wrong key"
    WRONG_SUBKEY = "wrong subkey"
    BAD_SIGNATURE = "bad signature"
    EXPIRED = "expired"
    EXPIRES_TOO_LATE = "expires too late"
    UNKNOWN_VERSION = "unknown version"


class RecordRejected(DhtError):
    """An entry of the DHT is forged, expired or malformed."""

    def __init__(self, reason: Rejection, detail: str = "") -> None:
        super().__init__(f"record rejected: {reason}" + (f" ({detail})" if detail else ""))
        self.reason = reason

"""The errors a user of the swarm can meet.

    SwarmError
    ├── UsageError           an option or value is wrong (exit code 2)
    ├── ArtifactError        a model file can't be used
    │   ├── NotAModel        missing file, not a GGUF, truncated
    │   ├── UnsupportedModel an architecture without span support
    │   ├── ArtifactMismatch digests or ids differ
    │   ├── StoreError       the folder for a model can't be used: in use, no room, another model's
    │   └── SourceError      where a model is fetched from does not give the right bytes
    ├── SpanError            layers out of range, or an illegal cut
    ├── NotEnoughMemory
    ├── NetworkError         can't listen, can't reach an initial peer
    │   └── ClockSkew        this clock and the swarm's differ too much
    ├── NoPeersGiven
    ├── NoRoute              some layers have no peer
    ├── PeerFailed           a hop of a session broke
    │   ├── NodeFull         no free slot; retry_after_seconds says when to come back
    │   ├── IncompatiblePeer versions, artifacts or numerics differ
    │   └── ProtocolError    a peer sent something that makes no sense
    ├── ContextExceeded      the prompt is longer than the chain's context
    └── SessionLost          state is gone and can't be rebuilt
        └── SessionPoisoned  the session's steps end engines

Every message is one line and ends with the next thing to do. ``exit_code`` is what the command-line programs return.
"""

from __future__ import annotations

from collections.abc import Sequence


class SwarmError(Exception):
    """Base of everything this package raises on purpose. ``peer`` is the id of the peer whose answer it is, if any;
    ``code`` the wire's number for what that peer said, 0 when it said nothing, or nothing that makes sense. ``blamed``:
    that its engine died in a step of this session."""

    exit_code = 1
    peer: str = ""
    code: int = 0
    blamed: bool = False


class UsageError(SwarmError):
    """An option or a value given by the user is wrong."""

    exit_code = 2


class ArtifactError(SwarmError):
    """A model file can't be used."""

    exit_code = 3


class NotAModel(ArtifactError):
    """The file is missing, is no GGUF, or ends too early."""


class UnsupportedModel(ArtifactError):
    """The architecture has no span support."""


class ArtifactMismatch(ArtifactError):
    """A digest or an artifact id differs from the expected one."""


class StoreError(ArtifactError):
    """The folder that a model is fetched into can't be used: no room, no permission, in use, another model's."""


class SourceError(ArtifactError):
    """A folder or server does not give the bytes it should, or not any more."""


class SpanError(SwarmError):
    """A layer range is empty, out of range, or starts or ends at an illegal cut."""

    exit_code = 4


class NotEnoughMemory(SwarmError):
    """The span does not fit."""

    exit_code = 5


class NetworkError(SwarmError):
    """The node can't listen, or reaches nobody."""

    exit_code = 6


class ClockSkew(NetworkError):
    """This clock and the swarm's differ by more than the records tolerate."""


class NoPeersGiven(NetworkError):
    """Nobody to join and no new swarm asked for."""


class NoRoute(SwarmError):
    """No chain covers every layer. ``missing`` holds the uncovered ranges ``(first, last)``."""

    exit_code = 7

    def __init__(self, message: str, missing: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class PeerFailed(SwarmError):
    """A hop of a session broke. ``peer`` is its id, ``layers`` what it ran."""

    exit_code = 8

    def __init__(self, message: str, peer: str = "", layers: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        self.layers = layers


class NodeFull(PeerFailed):
    """Every slot that is large enough is taken."""

    def __init__(self, message: str, peer: str = "", retry_after_seconds: float = 0.0) -> None:
        super().__init__(message, peer)
        self.retry_after_seconds = retry_after_seconds


class IncompatiblePeer(PeerFailed):
    """The peer speaks another version, serves another artifact or computes with another ``numerics_id``."""


class ProtocolError(PeerFailed):
    """The peer sent a frame that is malformed, too large or out of order."""


class ContextExceeded(SwarmError):
    """The prompt and the tokens to generate don't fit the chain's context."""

    exit_code = 9


class SessionLost(SwarmError):
    """State of the session is gone and can't be rebuilt."""

    exit_code = 10


class SessionPoisoned(SessionLost):
    """Steps of this session ended two engines; no node takes it again."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a task group that is no group itself."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

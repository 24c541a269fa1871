"""Sessions and the slots they book. Plain accounting: no sockets, no engine, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from dht.record import SlotClass
from shim.types import ContextSpec
from swarm.ids import PeerId, SessionId
from swarm.protocol import WireError, pb

RETRY_AFTER_SECONDS = 2.0


@dataclass(frozen=True)
class Terms:
    """What client and hop agreed on when the session was opened."""

    run: tuple[int, int]
    context_tokens: int
    chunk_tokens: int
    encoding: pb.ActivationEncoding.ValueType
    keep_journal: bool = False
    purpose: str = ""
    suspect: bool = False


@dataclass(frozen=True)
class Neighbour:
    peer_id: PeerId
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """Who may write to the session and whom it feeds, in one epoch. ``successor`` is None on the exit; it must be fed
    from ``successor_position``, by this hop's journal when ``push_journal``, else by what is replayed through it."""

    epoch: int
    predecessor: Neighbour
    successor: Neighbour | None
    hop_index: int = 0
    successor_position: int = 0
    push_journal: bool = False


@dataclass(eq=False)
class Session:
    """One client's sequence in this hop.

    ``position`` is what the engine holds, ``planned`` what it will hold when every accepted step is computed.
    """

    id: SessionId
    owner: PeerId
    terms: Terms
    route: Route
    slot: int
    slot_tokens: int
    position: int = 0
    planned: int = 0
    last_step: int = 0
    last_row: int | None = None  # position of the row that the engine keeps for RowRequest
    suspect: bool = False  # a step to come may end the engine

    @property
    def epoch(self) -> int:
        return self.route.epoch

    def is_stale(self, epoch: int, step: int) -> bool:
        """A late frame: it must not destroy newer state."""
        return epoch < self.epoch or (epoch == self.epoch and step <= self.last_step)

    def accept(self, step: int, start: int, count: int) -> None:
        """Books the rows of one step. Raises WireError when they don't follow what is held or don't fit."""
        if count > self.terms.chunk_tokens:
            raise WireError(pb.TOO_LARGE, f"{count} rows in a step, at most {self.terms.chunk_tokens} were agreed")
        if start + count > self.terms.context_tokens:
            raise WireError(
                pb.CONTEXT_FULL,
                f"position {start + count} is beyond the session's {self.terms.context_tokens} tokens",
                position=self.planned,
            )
        if start > self.planned:
            raise WireError(
                pb.GAP,
                f"the step starts at {start}, but only {self.planned} tokens are held",
                position=self.planned,
            )
        self.last_step = step
        self.planned = start + count
        self.last_row = None

    def computed(self, position: int) -> None:
        self.position = position

    def holds(self, position: int) -> None:
        """The engine was given the tokens below ``position``, and computed none of them."""
        self.position = self.planned = position

    def lost(self, position: int) -> None:
        """A step failed and the engine holds ``position`` tokens."""
        self.position = self.planned = position
        self.last_row = None

    def reroute(self, route: Route) -> None:
        if route.epoch <= self.epoch:
            raise WireError(pb.STALE_EPOCH, f"epoch {route.epoch} is not above {self.epoch}")
        self.route = route
        self.last_step = 0

    def rewind(self, position: int) -> None:
        """Forgets what is held beyond ``position``, and what was accepted and not computed."""
        self.position = self.planned = min(self.position, position)
        if self.last_row is not None and self.last_row >= self.position:
            self.last_row = None


@dataclass
class Slots:
    """Free and booked slots, numbered through all contexts as the engine does."""

    contexts: Sequence[ContextSpec]
    _tokens: list[int] = field(init=False)
    _context: list[int] = field(init=False)
    _free: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = [spec.tokens for spec in self.contexts for _ in range(spec.slots)]
        self._context = [index for index, spec in enumerate(self.contexts) for _ in range(spec.slots)]
        self._free = set(range(len(self._tokens)))

    def book(self, tokens: int) -> int:
        """The smallest free slot that holds ``tokens``. Raises WireError at once when there is none."""
        longest = max(self._tokens)
        if tokens > longest:
            raise WireError(pb.CONTEXT_FULL, f"{tokens} tokens don't fit the node's largest slot of {longest}")
        fitting = [slot for slot in self._free if self._tokens[slot] >= tokens]
        if not fitting:
            raise WireError(
                pb.NODE_FULL,
                f"no slot of {tokens} tokens is free",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        slot = min(fitting, key=lambda free: (self._tokens[free], free))
        self._free.remove(slot)
        return slot

    def release(self, slot: int) -> None:
        assert slot not in self._free
        self._free.add(slot)

    def tokens(self, slot: int) -> int:
        return self._tokens[slot]

    def context(self, slot: int) -> int:
        return self._context[slot]

    @property
    def booked(self) -> int:
        return len(self._tokens) - len(self._free)

    def classes(self, to_be_had: Collection[int] = ()) -> tuple[SlotClass, ...]:
        """As announced: slots of one size together, in rising order. Booked ones ``to_be_had`` count as free."""
        total = Counter(self._tokens)
        free = Counter(self._tokens[slot] for slot in self._free.union(to_be_had))
        return tuple(SlotClass(tokens=size, total=total[size], free=free[size]) for size in sorted(total))


@dataclass(frozen=True)
class Counts:
    """What is in use; all zero when nobody is served."""

    sessions: int = 0
    slots: int = 0
    kv_tokens: int = 0


class SessionTable:
    """Sessions by id. A session leaves the way it came: its slot is free and nothing is counted for it."""

    def __init__(self, contexts: Sequence[ContextSpec], sessions_per_peer: int) -> None:
        self.slots = Slots(contexts)
        self._sessions: dict[SessionId, Session] = {}
        self._per_peer = sessions_per_peer

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def get(self, session_id: bytes) -> Session | None:
        return self._sessions.get(SessionId(session_id))

    def open(self, session_id: SessionId, owner: PeerId, terms: Terms, route: Route) -> Session:
        """Books a slot. Raises WireError; nothing was changed then."""
        if session_id in self._sessions:
            raise WireError(pb.NOT_ALLOWED, "the session is open already")
        if sum(session.owner == owner for session in self._sessions.values()) >= self._per_peer:
            raise WireError(
                pb.LIMIT_REACHED,
                f"{self._per_peer} sessions of one peer are open here, and it may have no more",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        slot = self.slots.book(terms.context_tokens)
        session = Session(session_id, owner, terms, route, slot, self.slots.tokens(slot), suspect=terms.suspect)
        self._sessions[session_id] = session
        return session

    def close(self, session: Session) -> None:
        """Frees the slot; does nothing when the session is closed already."""
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
            self.slots.release(session.slot)

    def counts(self) -> Counts:
        held = sum(session.position for session in self._sessions.values())
        return Counts(len(self._sessions), self.slots.booked, held)

"""Opens a session: plans a chain over the local view, tries it, and plans again around peers that refuse."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from dht.record import SpanRecord
from swarm.artifact.manifest import Manifest
from swarm.client.blame import Avoided, is_to_blame
from swarm.client.chain import ChainSession, SessionTerms
from swarm.client.config import ClientConfig
from swarm.client.context import check_context
from swarm.client.hop import HopPlace, Network
from swarm.client.reminder import Reminder
from swarm.errors import ContextExceeded, NodeFull, NoRoute, PeerFailed, SwarmError
from swarm.ids import PeerId
from swarm.protocol import clean_text, pb
from swarm.protocol.limits import MAX_ADDRESSES, MAX_TEXT
from swarm.routing import Chain, Hop, RouteRequest, route

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
MAX_NAME = 40  # characters of a peer's name that are shown
MAX_SIZES = 16  # slot sizes tried; records may claim any number

Records = Sequence[SpanRecord]
Status = Callable[[str], None]


@dataclass(frozen=True)
class Need:
    """What an answer takes. ``max_tokens`` None: all the chain has. ``context_tokens`` fixes the session's size."""

    n_prompt: int
    max_tokens: int | None = None
    context_tokens: int | None = None

    def with_room_to_go_on(self) -> Need:
        """As much context as a chain has, beyond what this answer takes."""
        if self.context_tokens is not None or self.max_tokens is None:
            return self
        return Need(self.n_prompt + self.max_tokens - 1)


@dataclass(frozen=True)
class Plan:
    chain: Chain
    context_tokens: int

    def places(self) -> tuple[HopPlace, ...]:
        return tuple(place_of(hop, index) for index, hop in enumerate(self.chain.hops))


def place_of(hop: Hop, index: int) -> HopPlace:
    addresses = tuple(address for address in hop.record.addresses if len(address) <= MAX_TEXT)
    return HopPlace(
        index=index,
        peer_id=PeerId(hop.peer_id),
        layers=(hop.first, hop.last),
        addresses=addresses[:MAX_ADDRESSES],
        name=clean_text(hop.record.public_name, MAX_NAME),
    )


def plan(records: Records, request: RouteRequest, need: Need, n_ctx_train: int) -> Plan:
    """Pure. Raises NoRoute, or ContextExceeded with the numbers when prompt and answer fit no chain."""
    sizes = _sizes(records, n_ctx_train)
    if need.context_tokens is not None:
        check_context(need.n_prompt, need.max_tokens, need.context_tokens)
    elif need.max_tokens is None:
        for size in sizes:
            if size > need.n_prompt and (chain := _route_or_none(records, request, size)):
                return Plan(chain, size)
    size = need.context_tokens or need.n_prompt + (need.max_tokens or 1)
    try:
        return Plan(route(records, replace(request, context_tokens=size)), size)
    except ContextExceeded:
        all_free = [_emptied(record) for record in records]
        largest = next((size for size in sizes if _route_or_none(all_free, request, size)), 0)
        if need.context_tokens is None:
            check_context(need.n_prompt, need.max_tokens, largest)
        raise


def _sizes(records: Records, n_ctx_train: int) -> list[int]:
    """Sizes of session that slots allow, the largest first."""
    sizes = {min(slots.tokens, n_ctx_train) for record in records for slots in record.slots}
    return sorted(sizes, reverse=True)[:MAX_SIZES]


def _emptied(record: SpanRecord) -> SpanRecord:
    slots = tuple(slot.model_copy(update={"free": slot.total}) for slot in record.slots)
    return record.model_copy(update={"slots": slots})


def _route_or_none(records: Records, request: RouteRequest, context_tokens: int) -> Chain | None:
    try:
        return route(records, replace(request, context_tokens=context_tokens))
    except (NoRoute, ContextExceeded):
        return None


class SessionOpener:
    """Tries chains until one opens or ``route_seconds`` have passed; ``on_status`` hears why it waits."""

    def __init__(
        self,
        network: Network,
        look: Callable[[], Awaitable[Records]],
        manifest: Manifest,
        request: RouteRequest,
        config: ClientConfig,
        avoided: Avoided,
        on_status: Status,
    ) -> None:
        self._network = network
        self._look = look
        self._manifest = manifest
        self._request = request
        self._config = config
        self._avoided = avoided
        self._waiting = Reminder(on_status)
        self._refused: dict[PeerId, SwarmError] = {}  # by peers of this round
        self._limited: dict[PeerId, float] = {}  # until when those that had enough of this client are not asked
        self._last_refusal: SwarmError | None = None

    async def open(self, need: Need) -> ChainSession:
        deadline = time.monotonic() + self._config.timeouts.route_seconds
        while True:
            try:
                planned = self._plan(await self._look(), need)
            except NoRoute as error:
                if self._refused and not any(isinstance(refusal, PeerFailed) for refusal in self._refused.values()):
                    raise next(reversed(self._refused.values())) from None  # the same tomorrow
                await self._wait(_explained(self._last_refusal, error), deadline)
                continue
            session = await self._try(planned)
            if session is not None:
                return session

    def _plan(self, records: Records, need: Need) -> Plan:
        refused = frozenset(self._refused)
        try:
            return self._planned(records, need, refused | self._avoided.now())
        except NoRoute:
            return self._planned(records, need, refused)

    def _planned(self, records: Records, need: Need, banned: frozenset[str]) -> Plan:
        request = replace(self._request, banned=banned, banned_edges=self._avoided.edges())
        return plan(records, request, need, self._manifest.n_ctx_train)

    async def _try(self, planned: Plan) -> ChainSession | None:
        terms = SessionTerms(
            artifact_id=self._manifest.artifact_id,
            n_vocab=self._manifest.n_vocab,
            context_tokens=planned.context_tokens,
            chunk_tokens=planned.chain.chunk_tokens,
            purpose=self._config.purpose,
        )
        try:
            session = await ChainSession.open(self._network, planned.places(), terms, self._config.timeouts)
        except SwarmError as error:
            # whatever a peer says of itself, another may see it differently: its record had promised otherwise
            if not error.peer:
                raise
            logger.info("%s", error)
            self._refused[PeerId(error.peer)] = self._last_refusal = error
            if isinstance(error, NodeFull) and error.code == pb.LIMIT_REACHED:
                self._limited[PeerId(error.peer)] = time.monotonic() + error.retry_after_seconds
            if is_to_blame(error):
                self._avoided.add(PeerId(error.peer))
            return None
        return session

    async def _wait(self, reason: SwarmError, deadline: float) -> None:
        """Peers that refused are asked again after a pause: a slot may be free, a restarted engine ready."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise reason
        why = str(reason).partition("; ")[0]  # what to do about it comes when waiting was in vain
        self._waiting.tell(f"waiting up to {left:.0f} s more: {why}", why)
        pause = min(POLL_SECONDS, left)
        soon = time.monotonic() + pause
        self._refused = {
            peer: error
            for peer, error in self._refused.items()
            if not isinstance(error, PeerFailed) or self._limited.get(peer, 0.0) > soon
        }
        await asyncio.sleep(pause)


def _explained(refusal: SwarmError | None, no_route: NoRoute) -> SwarmError:
    """Why there is no chain. A peer that is gone leaves a hole: its error says what fills it."""
    if refusal is None:
        return no_route
    if type(refusal) is not PeerFailed:
        return refusal
    cause, advice = str(refusal).partition("; ")[0], str(no_route).partition("; ")[2]
    return PeerFailed(f"{cause}; {advice}", refusal.peer, refusal.layers)

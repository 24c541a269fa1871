"""The swarm as a library: join, look around, open sessions, generate."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from dht.errors import BadAddress, ClockSkewed, DhtError
from dht.record import NodeState, SpanRecord
from swarm.artifact.catalog import name_of
from swarm.client.artifact_cache import ArtifactCache, Source
from swarm.client.blame import Avoided
from swarm.client.config import ClientConfig
from swarm.client.generate import Generation, GenerationOptions
from swarm.client.keeper import Keeper
from swarm.client.kept import KeptSessions
from swarm.client.lasting import LastingSession
from swarm.client.opening import Need, SessionOpener
from swarm.client.recovery import Recovery, Swarm
from swarm.client.reminder import Reminder
from swarm.client.reply import THINK, ReplyParser
from swarm.client.scout import Scout
from swarm.client.template import Message, ThinkingOptions
from swarm.errors import ArtifactMismatch, ClockSkew, NetworkError, NoPeersGiven, NoRoute, PeerFailed, UsageError
from swarm.ids import ArtifactId, PeerId
from swarm.protocol import clean_text
from swarm.routing import JoinHint, RouteRequest

if TYPE_CHECKING:
    from dht.listing import ArtifactEntry
    from dht.peer import Peer
    from dht.view import Snapshot, SwarmView
    from swarm.client.artifact import ClientArtifact
    from swarm.client.chain import ChainSession
    from swarm.client.steps import StepSession
    from swarm.replay import Track

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
MIN_ID_PREFIX = 6

NO_PEERS = (
    "no peers given; name one with --initial-peers ADDRESS or SWARM_PEERS, "
    "or start a swarm of your own: swarm-node --model PATH --new-swarm"
)


class SwarmClient:
    """A member of the swarm that serves nothing and needs no model file.

        async with SwarmClient.connect(["/ip4/.../p2p/..."]) as client:
            async with await client.chat([{"role": "user", "content": "Hello"}]) as answer:
                async for event in answer.events():
                    match event:
                        case Answer(text):
                            print(text, end="")

    Leaving the block ends every session that is still open. Not thread-safe: use it in the loop that opened it.
    """

    def __init__(
        self,
        initial_peers: Sequence[str],
        config: ClientConfig | None = None,
        *,
        on_status: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config or ClientConfig()
        self._initial_peers = tuple(initial_peers)
        self._status = on_status or (lambda text: logger.info("%s", text))
        self._peer: Peer | None = None
        self._view: SwarmView | None = None
        self._artifacts: dict[ArtifactId, ClientArtifact] = {}
        self._avoided = Avoided()
        self._sessions: set[LastingSession] = set()
        self._kept = KeptSessions(self.config.keep_sessions, self.config.keep_seconds)

    @classmethod
    def connect(
        cls,
        initial_peers: Sequence[str],
        config: ClientConfig | None = None,
        *,
        on_status: Callable[[str], None] | None = None,
    ) -> SwarmClient:
        """To be entered with ``async with``. ``on_status`` hears, in one line, what takes long."""
        return cls(initial_peers, config, on_status=on_status)

    async def __aenter__(self) -> SwarmClient:
        """Raises NoPeersGiven, NetworkError, ClockSkew."""
        if not self._initial_peers:
            raise NoPeersGiven(NO_PEERS)
        from dht.clock import check
        from dht.identity import Identity
        from dht.peer import Peer
        from dht.view import SwarmView

        with _network_errors():
            self._peer = await Peer.start(
                Identity.ephemeral(), initial_peers=self._initial_peers, client_only=True, clock=self.config.clock
            )
            try:
                await check(self._peer)
            except BaseException:
                await self.close()
                raise
        self._view = SwarmView(self._peer)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every open session and leaves the swarm. Safe to call again."""
        peer, self._peer = self._peer, None
        await self._kept.close()
        await asyncio.gather(*(session.close() for session in tuple(self._sessions)))
        if peer is not None:
            await peer.close()

    @property
    def peer_id(self) -> PeerId:
        return PeerId(self._network.peer_id)

    async def artifacts(self) -> tuple[ArtifactEntry, ...]:
        """What the swarm serves, by name; empty when nothing is announced."""
        with _network_errors():
            entries = await self._look.artifacts()
        return tuple(sorted(entries, key=lambda entry: (entry.name, entry.artifact_id)))

    async def snapshot(self, model: str | None = None) -> Snapshot:
        """The records of one artifact's nodes. ``model`` as in ``artifact``."""
        return await self._refresh(await self._entry(model))

    async def artifact(self, model: str | None = None) -> ClientArtifact:
        """Tokenizer and template of a model, from the cache or from its nodes.

        ``model`` is a name, an artifact id or its beginning; None takes the only one there is. Raises ArtifactMismatch
        when the swarm serves others, NoRoute when it serves none, PeerFailed when nobody hands out the tokenizer.
        """
        from swarm.client.artifact import ClientArtifact
        from swarm.client.info import InfoReader

        entry = await self._entry(model)
        artifact_id = ArtifactId(entry.artifact_id)
        known = self._artifacts.get(artifact_id)
        if known is None:
            cache = ArtifactCache(self.config.cache_dir)
            cached = cache.load(artifact_id)
            if cached is None:
                sources = _sources((await self._refresh(entry)).records)
                reader = InfoReader(self._network, self.config.timeouts)
                cached = await cache.fetch(artifact_id, sources, reader, self._progress(clean_text(entry.name)))
            known = self._artifacts[artifact_id] = ClientArtifact.load(cached, clean_text(entry.name))
        return known

    async def open_session(self, context_tokens: int, model: str | None = None) -> LastingSession:
        """A session of ``context_tokens`` over the best chain, for callers who send their own steps.

        Close it or use it in ``async with``. Raises NoRoute, ContextExceeded, PeerFailed.
        """
        artifact = await self.artifact(model)
        return await self._open(artifact, Need(context_tokens - 1, 1, context_tokens))

    async def release_kept(self) -> None:
        """Ends the sessions that wait for an answer to go on from them (``ClientConfig.keep_sessions``)."""
        await self._kept.release()

    async def fork(self, session: LastingSession) -> LastingSession:
        """Another session that has computed the same tokens, over the same hops, which copy what they hold; the two go
        their own ways. Raises UsageError while a step of ``session`` is under way, and what a hop says that can't copy:
        NodeFull when it has no slot left."""
        fork, track = await session.forked(self._network)
        artifact = self._artifacts[session.terms.artifact_id]
        return self._lasting(artifact, fork, track)

    async def generate(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        *,
        model: str | None = None,
        context_tokens: int | None = None,
    ) -> Generation:
        """Continues ``prompt``: text as it is, or token ids. Nothing is sent before the first token is asked for."""
        artifact = await self.artifact(model)
        tokens = artifact.encode(prompt, raw=True) if isinstance(prompt, str) else list(prompt)
        return self._generation(artifact, tokens, options, context_tokens)

    async def chat(
        self,
        messages: Sequence[Message],
        options: GenerationOptions | None = None,
        *,
        model: str | None = None,
        context_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **thinking: Unpack[ThinkingOptions],
    ) -> Generation:
        """Answers ``messages`` through the model's template; ``template_variables`` are for others than GLM's.

        The answer comes as tokens or as ``events()``: thinking, answer and tool calls apart. What to append to
        ``messages`` for the next turn is ``progress.reply.message()``.
        """
        artifact = await self.artifact(model)
        # In a thread: a stranger's template may compute for seconds, and other answers go on meanwhile.
        text = await asyncio.to_thread(
            artifact.template.render, messages, tools=tools, **{**(template_variables or {}), **thinking}
        )
        parser = ReplyParser(artifact.reply_format, thinking=text.rstrip().endswith(THINK), tools=tools or ())
        return self._generation(artifact, artifact.encode(text), options, context_tokens, parser)

    def _generation(
        self,
        artifact: ClientArtifact,
        tokens: Sequence[int],
        options: GenerationOptions | None,
        context_tokens: int | None,
        parser: ReplyParser | None = None,
    ) -> Generation:
        options = options or GenerationOptions(sampling=artifact.sampling, prefill_window=self.config.prefill_window)
        wrong = [token for token in tokens if not 0 <= token < artifact.manifest.n_vocab]
        if wrong:
            raise UsageError(f"token {wrong[0]} is outside the vocabulary of {artifact.name}; give ids of this model")
        need = Need(len(tokens), options.max_tokens, context_tokens)
        return Generation(
            tokens,
            options,
            artifact.vocabulary,
            lambda: self._kept_or_new(artifact, tokens, need),
            self._blame,
            parser,
            self._keep,
        )

    async def _kept_or_new(self, artifact: ClientArtifact, tokens: Sequence[int], need: Need) -> LastingSession:
        kept = self._kept.take(artifact.id, tokens, need)
        # a new one finds a chain where this one, with its hops and its size, may not
        if kept is not None and await kept.resume(self.config.timeouts.route_seconds):
            return kept
        await self._kept.make_room()
        return await self._open(artifact, need.with_room_to_go_on() if self.config.keep_sessions else need)

    async def _keep(self, session: StepSession) -> None:
        if isinstance(session, LastingSession):
            await self._kept.keep(session)
        else:
            await session.close()

    async def _open(self, artifact: ClientArtifact, need: Need) -> LastingSession:
        swarm = self._swarm(artifact)
        opener = SessionOpener(
            swarm.network, swarm.look, artifact.manifest, swarm.request, self.config, self._avoided, self._status
        )
        return self._lasting(artifact, await opener.open(need))

    def _lasting(
        self, artifact: ClientArtifact, chain: ChainSession, track: Track[tuple[int, ...]] | None = None
    ) -> LastingSession:
        swarm = self._swarm(artifact)
        recovery = Recovery(swarm, self.config, self._avoided, self._status)
        keeper = Keeper(swarm, self._avoided, recovery.understudies, standby=self.config.standby)
        scout = Scout(swarm, self._avoided, self.config.timeouts, self._status) if self.config.leave_slow else None
        session = LastingSession(chain, recovery, self._avoided, self._sessions.discard, track, keeper, scout)
        self._sessions.add(session)
        return session

    def _blame(self, error: PeerFailed) -> None:
        if error.peer:
            self._avoided.add(PeerId(error.peer))

    def _swarm(self, artifact: ClientArtifact) -> Swarm:
        manifest = artifact.manifest

        async def look() -> Sequence[SpanRecord]:
            with _network_errors():
                return (await self._look.refresh(manifest.artifact_id, manifest.n_layers, manifest.cuts)).records

        request = RouteRequest(
            legal_cuts=manifest.cuts,
            artifact_id=manifest.artifact_id,
            context_tokens=1,
            hint=JoinHint(name_of(manifest.artifact_id) or "PATH", self._initial_peers),
        )
        return Swarm(self._network, lambda: self._look.snapshot.records, look, request)

    async def _entry(self, model: str | None) -> ArtifactEntry:
        """Waits a little for records that are about to appear."""
        deadline = time.monotonic() + self.config.timeouts.route_seconds
        waiting = Reminder(self._status)
        while True:
            entries = await self.artifacts()
            if model is None and len({entry.artifact_id for entry in entries}) == 1:
                return entries[0]
            if model is not None and (found := _matching(entries, model)) is not None:
                return found
            left = deadline - time.monotonic()
            if left <= 0 or (model is None and entries):
                raise self._no_choice(model, entries)
            wanted = f"a node that serves {model}" if model else "a node that serves a model"
            waiting.tell(f"waiting up to {left:.0f} s more for {wanted}", wanted)
            await asyncio.sleep(min(POLL_SECONDS, left))

    def _no_choice(
        self, model: str | None, entries: Sequence[ArtifactEntry]
    ) -> NoRoute | ArtifactMismatch | UsageError:
        listed = ", ".join(f"{clean_text(entry.name) or 'unnamed'} ({entry.artifact_id[:12]})" for entry in entries)
        if not entries:
            command = f"swarm-node --model {shlex.quote(model or 'PATH')} --initial-peers {self._initial_peers[0]}"
            return NoRoute(f"no node of this swarm serves a model; start one: {command}")
        if model is None:
            return UsageError(f"the swarm serves several models: {listed}; choose one with --model")
        return ArtifactMismatch(f"the swarm does not serve {model} but {listed}; choose one of these with --model")

    async def _refresh(self, entry: ArtifactEntry) -> Snapshot:
        with _network_errors():
            return await self._look.refresh(entry.artifact_id, entry.n_layers, entry.cuts)

    def _progress(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self._status(f"fetching the tokenizer of {name}: {done >> 10} of {total >> 10} KiB")

    @property
    def _network(self) -> Peer:
        if self._peer is None:
            raise UsageError("the client is not connected; use it inside 'async with SwarmClient.connect(...)'")
        return self._peer

    @property
    def _look(self) -> SwarmView:
        if self._view is None or self._peer is None:
            raise UsageError("the client is not connected; use it inside 'async with SwarmClient.connect(...)'")
        return self._view


def _matching(entries: Sequence[ArtifactEntry], model: str) -> ArtifactEntry | None:
    wanted = model.lower()
    by_name = [entry for entry in entries if entry.name.lower() == wanted]
    by_id = [entry for entry in entries if len(wanted) >= MIN_ID_PREFIX and entry.artifact_id.startswith(wanted)]
    found = {entry.artifact_id: entry for entry in by_id or by_name}
    if len(found) > 1:
        ids = ", ".join(artifact_id[:12] for artifact_id in found)
        raise UsageError(f"{model} stands for several artifacts ({ids}); give the beginning of one id with --model")
    return next(iter(found.values()), None)


def _sources(records: Sequence[SpanRecord]) -> list[Source]:
    """Peers to ask for metadata, those that serve already first."""
    ready = sorted(records, key=lambda record: record.state is not NodeState.ONLINE)
    return [Source(PeerId(record.peer_id), record.addresses) for record in ready]


@contextmanager
def _network_errors() -> Iterator[None]:
    """The errors of the network in the words of this package."""
    try:
        yield
    except ClockSkewed as error:
        raise ClockSkew(str(error)) from error
    except BadAddress as error:
        raise UsageError(str(error)) from error
    except DhtError as error:
        raise NetworkError(str(error)) from error

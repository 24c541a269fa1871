"""Copies what a session holds to an understudy on another node, while the session goes on.

One idea: the copier knows up to where the understudy holds the very rows that this hop holds. Whatever is computed anew
lowers that mark at once, also in the middle of a block, and copying goes on from there. One layer of one block is read
at a time, so that a step waits for little.
"""

from __future__ import annotations

import asyncio
import logging

from shim.errors import EngineError, StepGap
from swarm.errors import first_error
from swarm.node.link import Greeting, Link, LinkBroken
from swarm.node.live import LiveSession
from swarm.node.sessions import Neighbour
from swarm.node.shared import Shared
from swarm.protocol import STATE_STREAM, FrameStream, Received, clean_text, pb
from swarm.protocol.limits import STATE_BLOCK_TOKENS

logger = logging.getLogger(__name__)

FRAME_BYTES = 512 << 10  # of rows


class _Disturbed(Exception):
    """What was being read is not what the session holds now."""


class Copier:
    """From one session to one understudy. ``run`` goes on until it is cancelled or copying has failed."""

    def __init__(
        self, shared: Shared, live: LiveSession, control: FrameStream, to: Neighbour, run: tuple[int, int]
    ) -> None:
        self._shared = shared
        self._live = live
        self._control = control
        self._run = run
        session = live.session
        offer = pb.StateOffer(
            session_id=session.id,
            artifact_id=shared.manifest.artifact_id,
            numerics_id=shared.host.info.numerics_id,
            run=pb.Layers(first=session.terms.run[0], last=session.terms.run[1]),
        )
        greeting = Greeting(STATE_STREAM, offer, pb.StateAccepted, "the understudy")
        self._link = Link(shared.dialer, to, greeting, shared.timeouts, shared.tally.streams[STATE_STREAM])
        self._upto = self._order = 0
        self._rows = self._pushed = 0  # the understudy has this hop's rows, and its journal, up to here
        self._reading = 0  # end of what is being read
        self._disturbed = False  # something below it was computed anew
        self._nonce = self._acknowledged = 0
        self._held = pb.StateHeld()
        self._told: tuple[int, int, bool] = (0, 0, False)
        self._news = False  # more was sent than the understudy has acknowledged
        self._asked = False  # the client waits to hear of it in any case
        self._wake = asyncio.Event()
        self._heard = asyncio.Event()

    @property
    def peer_id(self) -> str:
        return self._link.neighbour.peer_id

    def aim(self, upto_tokens: int, order: int) -> None:
        """Everything below ``upto_tokens`` and the journal; 0 for finished blocks only. ``order`` is told with what is
        copied from then on: a word about an earlier order may be under way while the session goes back."""
        self._upto, self._order = upto_tokens, order
        self._news = self._asked = True
        self._wake.set()

    # --- what the session says

    def changed(self) -> None:
        self._wake.set()

    def rewritten(self, start: int) -> None:
        self._rows = min(self._rows, start)  # and the journal follows, when these are copied again
        if start < self._reading:
            self._disturbed = True

    # --- copying

    async def run(self) -> None:
        failure = ""
        self._shared.copies += 1
        try:
            with self._live.watched_by(self):
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch())
                    await self._link.open()
                    await self._go_on()
        except* (LinkBroken, EngineError) as broken:
            failure = str(first_error(broken))
            logger.info("copying a session to %s has failed: %s", self.peer_id, failure)
        finally:
            self._shared.copies -= 1
            await self._link.close()
        await self._tell(self._order, failure=failure)

    async def _watch(self) -> None:
        raise await self._link.watch(self._hears)

    def _hears(self, received: Received) -> bool:
        if isinstance(received, pb.StateHeld):
            self._held = received
        elif isinstance(received, pb.Pong) and received.nonce:
            self._acknowledged = max(self._acknowledged, received.nonce)
            self._heard.set()
        return isinstance(received, pb.StateHeld)

    async def _go_on(self) -> None:
        while not self._live.closed:
            self._wake.clear()
            goal = self._goal()
            try:
                if self._rows < goal:
                    await self._copy_block(min(goal, (self._rows // STATE_BLOCK_TOKENS + 1) * STATE_BLOCK_TOKENS))
                elif self._finishing(goal) and self._pushed < goal:
                    await self._push_journal()
                else:
                    await self._report(done=self._finishing(goal))
                    await self._wake.wait()
            except _Disturbed:
                continue
            except StepGap:  # a step has failed, which is told in a moment
                await self._wake.wait()

    def _goal(self) -> int:
        standing = self._live.standing
        if 0 < self._upto <= standing:
            return self._upto
        return standing // STATE_BLOCK_TOKENS * STATE_BLOCK_TOKENS

    def _finishing(self, goal: int) -> bool:
        return 0 < self._upto == goal

    async def _copy_block(self, end: int) -> None:
        first = self._rows
        self._begin_reading(end)
        self._pushed = min(self._pushed, first)  # the understudy forgets its journal above
        for layer in range(*self._run):
            await self._copy_layer(layer, first, end)
        self._rows = end
        self._news = True
        await self._report()

    async def _copy_layer(self, layer: int, first: int, end: int) -> None:
        size = await self._shared.host.kv_row_bytes(layer)
        most = max(1, FRAME_BYTES // size.total)
        for at in range(first, end, most):
            count = min(most, end - at)
            rows = pb.KvRows(
                layer=layer,
                first=at,
                count=count,
                key_bytes=size.keys,
                value_bytes=size.values,
                indexer_bytes=size.indexer_keys,
                data=await self._read(layer, at, count),
            )
            await self._link.send(rows)
        self._check_reading()

    async def _read(self, layer: int, first: int, count: int) -> bytes:
        self._check_reading()  # and nothing is awaited from here to the call: the slot may be another's a moment later
        rows = await self._shared.host.kv_read(self._live.session.slot, layer, first, count)
        self._check_reading()
        return rows.tobytes()

    async def _push_journal(self) -> None:
        """As far as there is one, and as it stands: rows behind ``upto_tokens`` are cut off at the other end."""
        live, journal = self._live, self._live.journal
        end = live.session.position
        self._begin_reading(end)
        if journal is not None and self._run[1] == live.session.terms.run[1]:
            number = 0
            try:
                for push in journal.pushes(max(journal.first, self._pushed), live.session.terms.chunk_tokens):
                    self._check_reading()
                    number += 1
                    step = pb.Step(
                        session_id=live.session.id,
                        epoch=live.session.epoch,
                        step=number,
                        start=push.start,
                        n_tokens=len(push.rows),
                        kind=pb.PREFILL if push.chunk else pb.DECODE,
                        encoding=pb.F32_LE,
                        replay=True,
                    )
                    await self._link.send_step(step, push.rows)
            except OSError as error:
                self._check_reading()
                logger.warning("a session's journal does not move with it: it can't be read (%s)", error.strerror)
        self._check_reading()
        self._pushed = end
        self._news = True

    def _begin_reading(self, end: int) -> None:
        self._reading, self._disturbed = end, False

    def _check_reading(self) -> None:
        if self._disturbed or self._live.closed:
            raise _Disturbed

    # --- telling

    async def _report(self, *, done: bool = False) -> None:
        """Tells the client what the understudy holds, once that has said so."""
        if not self._news:
            return
        self._news = False
        upto, order = self._upto, self._order
        self._nonce += 1
        await self._link.send(pb.Ping(nonce=self._nonce))
        while self._acknowledged < self._nonce:
            self._heard.clear()
            await self._heard.wait()
        done = done and self._rows >= upto and self._pushed >= upto > 0
        news = (self._held.position, self._held.journal_first, done)
        if news != self._told or self._asked:
            self._told = news
            self._asked = self._asked and order != self._order
            await self._tell(order, done=done)

    async def _tell(self, order: int, *, done: bool = False, failure: str = "") -> None:
        await self._control.send(
            pb.Copied(
                session_id=self._live.session.id,
                understudy=self.peer_id,
                position=self._held.position,
                journal_first=self._held.journal_first,
                done=done,
                failure=clean_text(failure),
                order=order,
            )
        )

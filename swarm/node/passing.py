"""How steps leave a hop: from the exit as answers to the client, from any other as pushes to the next hop."""

from __future__ import annotations

import asyncio
from typing import Protocol

from swarm.node.config import Timeouts
from swarm.node.link import Greeting, Link, LinkBroken
from swarm.node.live import Computed, Finished, LiveSession
from swarm.protocol import DATA_STREAM, FrameStream, WireError, clean_text, error_frame, pb
from swarm.protocol.limits import first_step
from swarm.protocol.questions import Dialer
from swarm.replay import Held

MAX_UINT32 = (1 << 32) - 1


class AnswerPasser:
    """``run`` goes on until it is cancelled or the client's stream closes (StreamClosed)."""

    def __init__(self, live: LiveSession, control: FrameStream, numerics_id: str) -> None:
        self._live = live
        self._control = control
        self._numerics_id = numerics_id

    async def run(self) -> None:
        while True:
            await _pass_next(self._live, self._control, self._answer)

    async def _answer(self, step: pb.Step, computed: Computed, timing: pb.HopTiming) -> None:
        if not step.replay:
            await self._control.send(self._message(step, computed), timing=timing)

    def _message(self, step: pb.Step, computed: Computed) -> pb.Answer:
        summaries = computed.result.summaries
        first = step.start + step.n_tokens - len(summaries)
        rows = [
            pb.RowSummary(
                position=first + index,
                top_ids=summary.top_ids.tolist(),
                top_logits=summary.top_logits.tolist(),
                rest_log_sum_exp=summary.rest_log_sum_exp,
                asked_logits=summary.asked.tolist(),
            )
            for index, summary in enumerate(summaries)
        ]
        return pb.Answer(
            session_id=self._live.session.id,
            epoch=step.epoch,
            step=step.step,
            position=step.start + step.n_tokens,
            rows=rows,
            timings=step.timings,
            numerics_id=self._numerics_id,
        )


class PushPasser:
    """``run`` as above, for one epoch: first what the journal holds for the successor, when the route asks for it. A
    broken link is told to the client once; what is computed after that is dropped until the client names a new
    successor."""

    def __init__(self, live: LiveSession, control: FrameStream, dialer: Dialer, timeouts: Timeouts) -> None:
        successor = live.session.route.successor
        assert successor is not None
        self._live = live
        self._control = control
        self._epoch = live.session.epoch
        attach = pb.Attach(session_id=live.session.id, epoch=self._epoch)
        greeting = Greeting(DATA_STREAM, attach, pb.Attached, "the successor")
        self._link = Link(dialer, successor, greeting, timeouts, live.tally.streams[DATA_STREAM])
        self._broken = False
        self._held = Held(live.session.route.successor_position)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                if self._live.session.route.push_journal:
                    await self._push_journal()
                while True:
                    await _pass_next(self._live, self._control, self._push)
        finally:
            await self._link.close()

    async def _watch(self) -> None:
        await self._report(await self._link.watch())

    async def _push_journal(self) -> None:
        session, journal = self._live.session, self._live.journal
        first = self._held.position
        if journal is None or first >= session.position:
            return
        self._held = Held(session.position)
        number = first_step(session.route.hop_index)
        try:
            for push in journal.pushes(first, session.terms.chunk_tokens):
                step = pb.Step(
                    session_id=session.id,
                    epoch=self._epoch,
                    step=number,
                    start=push.start,
                    n_tokens=len(push.rows),
                    kind=pb.PREFILL if push.chunk else pb.DECODE,
                    encoding=session.terms.encoding,
                    replay=True,
                )
                await self._link.send_step(step, push.rows)
                number += 1
        except LinkBroken as broken:
            await self._report(broken)
        except OSError as error:
            self._broken = True
            missing = WireError(pb.JOURNAL_MISSING, f"the journal can't be read ({error.strerror})")
            await self._control.send(error_frame(missing, session_id=session.id))

    async def _push(self, step: pb.Step, computed: Computed, timing: pb.HopTiming) -> None:
        if self._broken:
            return
        hidden = computed.result.hidden
        assert hidden is not None
        message = self._message(step)
        if step.replay:
            first = self._held.lacks(step.start, step.n_tokens, chunk=step.kind == pb.PREFILL)
            if first is None:
                return
            message.start, message.n_tokens, hidden = step.start + first, step.n_tokens - first, hidden[first:]
        try:
            await self._link.send_step(message, hidden, timing)
        except LinkBroken as broken:
            await self._report(broken)
            return
        if step.output.report_hops:
            position = step.start + step.n_tokens
            done = pb.StepDone(session_id=step.session_id, epoch=step.epoch, step=step.step, position=position)
            await self._control.send(done)

    def _message(self, step: pb.Step) -> pb.Step:
        return pb.Step(
            session_id=step.session_id,
            epoch=step.epoch,
            step=step.step,
            start=step.start,
            n_tokens=step.n_tokens,
            kind=step.kind,
            tokens=step.tokens if step.output.drafts else (),
            encoding=self._live.session.terms.encoding,
            output=step.output,
            timings=step.timings,
            replay=step.replay,
        )

    async def _report(self, broken: LinkBroken) -> None:
        if self._broken:
            return
        self._broken = True
        await self._control.send(
            pb.LinkFailed(
                session_id=self._live.session.id,
                epoch=self._epoch,
                successor=self._link.neighbour.peer_id,
                cause=clean_text(str(broken)),
            )
        )


class _Send(Protocol):
    async def __call__(self, step: pb.Step, computed: Computed, timing: pb.HopTiming) -> None: ...


async def _pass_next(live: LiveSession, control: FrameStream, send: _Send) -> None:
    """One step out of the outbox: sent on, or told to the client as an error. One of an epoch before is dropped."""
    finished = await live.outbox.get()
    step, outcome = finished.received.step, finished.outcome
    try:
        if step.epoch != live.session.epoch:
            return
        if isinstance(outcome, Computed):
            timing = _timing(live, finished, outcome)
            live.tally.passed(timing)
            await send(step, outcome, timing)
        else:
            raise outcome
    except WireError as error:
        live.tally.failed_steps[pb.ErrorCode.Name(error.code).lower()] += 1
        await control.send(error_frame(error, session_id=live.session.id, step=step.step))
    finally:
        live.passed_on()


def _timing(live: LiveSession, finished: Finished, computed: Computed) -> pb.HopTiming:
    """Of this hop; the stream adds ``sent_us`` and what encoding takes."""
    received_us = finished.received.received_us
    decode_us = round(finished.received.serialise_seconds * 1e6)
    compute_us = round(computed.result.compute_seconds * 1e6)
    ipc_us = round(computed.ipc_seconds * 1e6)
    # the rest of the time in the hop: waiting for other calls, here and in the pipe
    queue_us = max(0, computed.finished_us - received_us - decode_us - compute_us - ipc_us)
    # a replayed step's timing is read by nobody: what it took is told with the next step that will be answered
    replay_seconds = 0.0 if finished.received.step.replay else live.take_replay_seconds()
    return pb.HopTiming(
        hop_index=live.session.route.hop_index,
        received_us=received_us,
        queue_us=queue_us,
        compute_us=compute_us,
        serialise_us=decode_us,
        ipc_us=ipc_us,
        batch_rows=computed.batch_rows,
        batch_sessions=computed.batch_sessions,
        replay_us=min(round(replay_seconds * 1e6), MAX_UINT32),
    )

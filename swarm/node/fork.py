"""A session that begins with what another one of the same client holds."""

from __future__ import annotations

import asyncio

from shim.errors import EngineError
from swarm.ids import SessionId
from swarm.node.live import LiveSession
from swarm.node.shared import Shared
from swarm.protocol import WireError, pb
from swarm.protocol.limits import STATE_BLOCK_TOKENS


async def fork(shared: Shared, live: LiveSession, source_id: SessionId, tokens: int) -> None:
    """Copies KV and journal of the first ``tokens`` tokens, or of as many as the source holds, into the new ``live``.
    Raises WireError. The client sees to it that the source computes nothing meanwhile."""
    source = _source(shared, live, source_id)
    held = min(tokens, source.session.position)
    try:
        await _copy_kv(shared, source, live, held)
    except EngineError as error:
        raise WireError(pb.INTERNAL, f"the session's state can't be copied: {error}") from error
    if source.closed or source.session.position < held:
        raise WireError(pb.GAP, "the session to fork went on while it was copied")
    live.session.holds(held)
    await _copy_journal(source, live, held)


def _source(shared: Shared, live: LiveSession, source_id: SessionId) -> LiveSession:
    source, session = shared.lives.get(source_id), live.session
    if source is None or source is live or source.session.owner != session.owner:
        raise WireError(pb.NOT_ALLOWED, "the client has no such session to fork here")
    if source.understudy is not None or live.understudy is not None:
        raise WireError(pb.NOT_ALLOWED, "an understudy is given what it holds by its primary alone")
    theirs, ours = source.session.terms, session.terms
    if (theirs.run, theirs.chunk_tokens) != (ours.run, ours.chunk_tokens):
        raise WireError(pb.NOT_ALLOWED, "a fork runs the same layers in the same chunks")
    return source


async def _copy_kv(shared: Shared, source: LiveSession, live: LiveSession, held: int) -> None:
    for layer in range(*live.session.terms.run):
        for first in range(0, held, STATE_BLOCK_TOKENS):
            if live.closed:  # its slot may be another's already
                raise WireError(pb.UNKNOWN_SESSION, "the session has ended")
            count = min(STATE_BLOCK_TOKENS, held - first)
            await shared.host.kv_copy(source.session.slot, live.session.slot, layer, first, count)


async def _copy_journal(source: LiveSession, live: LiveSession, held: int) -> None:
    """What can't be read is missing, as it would be in the source."""
    if source.journal is None or live.journal is None:
        return
    try:
        for push in source.journal.pushes(source.journal.first, live.session.terms.chunk_tokens):
            live.journal.record(push.start, push.rows, chunk=push.chunk)
            await asyncio.sleep(0)  # reading a long journal is not to hold up other sessions
    except OSError:
        live.journal.truncate(0)
    live.journal.truncate(held)

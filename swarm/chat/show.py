"""How routes, timings and answers look on a terminal and as JSON. Pure functions."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.ids import PeerId

if TYPE_CHECKING:
    from swarm.client.artifact import ClientArtifact
    from swarm.client.generate import Generation
    from swarm.client.hop import HopPlace
    from swarm.client.trace import HopSummary, RecoveryTrace, Spread, StepTrace

BAR_COLUMNS = 48
PEER_ID = re.compile(r"\b(?:12D3Koo|Qm)[1-9A-HJ-NP-Za-km-z]{40,50}\b")


def route_line(route: Sequence[HopPlace]) -> str:
    """``route: alice 0:10 -> 12D3KooWx…y7Qz 10:30``"""
    hops = (f"{_name(place)} {place.layers[0]}:{place.layers[1]}" for place in route)
    return "route: " + " -> ".join(hops)


def speed_line(generation: Generation) -> str:
    progress = generation.progress
    first = progress.timing.first_token_seconds
    parts = [f"{len(progress.token_ids)} tokens", f"{generation.tokens_per_second:.1f} tokens/s"]
    if first is not None:
        parts.append(f"first after {first:.2f} s")
    if progress.reused_tokens:
        parts.append(f"{progress.reused_tokens} of {len(generation.prompt)} prompt tokens were there already")
    if progress.recoveries:
        pause = sum(recovery.pause_seconds for recovery in progress.recoveries)
        times = len(progress.recoveries)
        parts.append(f"{times} recover{'y' if times == 1 else 'ies'} in {pause:.2f} s (--trace tells more)")
    if progress.stop_reason is not None:
        parts.append(f"ended by {progress.stop_reason}")
    return ", ".join(parts)


def unfinished_line(generation: Generation) -> str:
    """Why there is no answer: the model was still thinking."""
    reason = generation.progress.stop_reason
    advice = "give it more room (--max-tokens, --context-tokens) or less to think about (--effort)"
    return f"the answer was ended by {reason} while the model was still thinking; {advice}"


def cut_line(generation: Generation) -> str:
    """Why the answer ends in the middle: nothing is left of the context."""
    used = f"prompt and answer have filled the context of {generation.context_tokens} tokens"
    return f"the answer is cut off: {used}; begin with less (/clear) or ask for more (--context-tokens, nodes: --slots)"


def as_json(generation: Generation, artifact: ClientArtifact) -> str:
    progress = generation.progress
    return json.dumps(
        {
            "answer": progress.reply.answer,
            "thinking": progress.reply.thinking,
            "thinking_unfinished": progress.reply.thinking_unfinished,
            "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in progress.reply.tool_calls],
            "token_ids": progress.token_ids,
            "prompt_tokens": len(generation.prompt),
            "reused_tokens": progress.reused_tokens,
            "stop_reason": progress.stop_reason,
            "model": artifact.name,
            "artifact_id": artifact.id,
            "seed": generation.seed,
            "context_tokens": generation.context_tokens,
            "route": [
                {"peer": place.peer_id, "layers": list(place.layers), "name": place.name} for place in generation.route
            ],
            "numerics_ids": list(progress.numerics_ids),
            "recoveries": [_recovery_json(recovery) for recovery in progress.recoveries],
            "hops": [_hop_json(hop) for hop in generation.hops],
            "tokens_per_second": round(generation.tokens_per_second, 3),
            "first_token_seconds": progress.timing.first_token_seconds,
            "full_rows_fetched": progress.full_rows,
        },
        ensure_ascii=False,
    )


def waterfall(trace: StepTrace, route: Sequence[HopPlace]) -> list[str]:
    """One line per stretch of time, drawn to scale: network, queue, compute and the rest of each hop."""
    names = {(place.peer_id, place.layers): _name(place) for place in route}
    total = max(trace.total_us, 1)
    lines = [f"last token (position {trace.start + trace.n_tokens}): {total / 1000:.2f} ms"]
    for stretch in _stretches(trace, names):
        lines.append(f"  {stretch.label:<34} {stretch.length_us / 1000:8.2f} ms  {_bar(stretch, total)}")
    return lines


def with_short_ids(text: str, names: Mapping[str, str]) -> str:
    """Peers by the names of ``names``, or by the ends of their ids, as routes show them."""
    return PEER_ID.sub(lambda found: names.get(found[0]) or _short(found[0]), text)


def printable(text: str) -> str:
    """For a terminal: a model must not send it control sequences."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "�" for c in text)


def dimmed(text: str) -> str:
    """Each piece for itself, so that an interrupt leaves the terminal as it was."""
    return f"\x1b[2m{text}\x1b[22m"


@dataclass(frozen=True)
class _Stretch:
    label: str
    start_us: int
    length_us: int
    mark: str


def _stretches(trace: StepTrace, names: Mapping[tuple[PeerId, tuple[int, int]], str]) -> Iterator[_Stretch]:
    sender = "here"
    for hop in trace.hops:
        name = f"{names.get((hop.peer_id, hop.layers), hop.peer_id[-8:])} {hop.layers[0]}:{hop.layers[1]}"
        at = hop.received_us
        yield _Stretch(f"network {sender} ->", at - hop.network_us, hop.network_us, "·")
        for what, length, mark in (
            ("queue", hop.queue_us, "-"),
            ("compute", hop.compute_us, "#"),
            ("serialise and ipc", hop.serialise_us + hop.ipc_us, "+"),
        ):
            yield _Stretch(f"{name} {what}", at, length, mark)
            at += length
        sender = name
    yield _Stretch(f"network {sender} -> here", trace.total_us - trace.return_us, trace.return_us, "·")


def _bar(stretch: _Stretch, total_us: int) -> str:
    start = min(max(round(BAR_COLUMNS * stretch.start_us / total_us), 0), BAR_COLUMNS - 1)
    length = max(round(BAR_COLUMNS * stretch.length_us / total_us), 1)
    return (" " * start + stretch.mark * min(length, BAR_COLUMNS - start)).ljust(BAR_COLUMNS).rstrip()


def names_of(route: Sequence[HopPlace]) -> dict[str, str]:
    """By peer id."""
    return {place.peer_id: _name(place) for place in route}


def _name(place: HopPlace) -> str:
    return printable(place.name) if place.name else _short(place.peer_id)


def _short(peer_id: str) -> str:
    return f"{peer_id[:6]}…{peer_id[-6:]}"


def _recovery_json(recovery: RecoveryTrace) -> dict[str, object]:
    return {
        "position": recovery.position,
        "seconds": round(recovery.pause_seconds, 3),
        "lost": [{"peer": peer, "layers": list(layers)} for peer, layers in recovery.lost],
        "came": [{"peer": peer, "layers": list(layers)} for peer, layers in recovery.came],
        "story": list(recovery.story),
    }


def _hop_json(hop: HopSummary) -> dict[str, object]:
    return {
        "peer": hop.peer_id,
        "layers": list(hop.layers),
        "queue_ms": _spread_json(hop.queue),
        "compute_ms": _spread_json(hop.compute),
        "serialise_ms": _spread_json(hop.serialise),
        "ipc_ms": _spread_json(hop.ipc),
        "network_ms": _spread_json(hop.network),
    }


def _spread_json(spread: Spread) -> dict[str, float]:
    return {"p50": round(spread.p50_ms, 3), "p95": round(spread.p95_ms, 3)}

"""The command line of ``swarm-chat``. Imports nothing heavy: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from swarm.chat.settings import PEERS_VARIABLE, initial_peers
from swarm.config_file import config_path
from swarm.errors import UsageError

if TYPE_CHECKING:
    from swarm.client.template import ThinkingOptions

PROG = "swarm-chat"
EFFORTS = ("max", "high", "none")

DESCRIPTION = "Chat with a model that a swarm of peers serves. No model file is needed here."

EPILOG = f"""\
examples:
  {PROG} --initial-peers /ip4/192.0.2.7/tcp/4711/p2p/12D3Koo...
        a conversation; Alt-Enter starts a new line, Ctrl-C stops an answer, /quit leaves
  {PROG} --initial-peers ADDRESS -p "What is the capital of France?"
        one answer on stdout, everything else on stderr; thinking only when that is a terminal
  export {PEERS_VARIABLE}=ADDRESS
  git diff | {PROG} --system "Review this patch." > review.md
        the prompt from a pipe
  {PROG} --greedy --json -p "Name three rivers." | jq .tokens_per_second
        one JSON object: answer, token ids, route, timings

ADDRESS is the line a node prints at its start (swarm-node --model PATH --new-swarm).
Sampling follows the model's own recommendation unless an option says otherwise.
When a peer is lost, the answer goes on over others without a change: it waits for them up to 60 s.

exit codes: 0 answered, 2 wrong option, 3 no such model, 6 network, 7 no peer for some layers, 8 a peer failed,
9 prompt longer than the context, 10 session lost or --timeout over, 130 interrupted.
"""


@dataclass(frozen=True)
class SamplingOptions:
    """None: the model's recommendation."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    seed: int | None


@dataclass(frozen=True)
class ChatOptions:
    prompt: str | None
    system: str | None
    raw: bool
    model: str | None
    initial_peers: tuple[str, ...]
    sampling: SamplingOptions
    max_tokens: int | None
    stop: tuple[str, ...]
    context_tokens: int | None
    effort: str | None
    keep_thinking: bool
    timeout_seconds: float | None
    wait_seconds: float
    standby: bool
    json: bool
    trace: bool
    show_route: bool | None  # None: when stderr is a terminal
    show_thinking: bool | None  # None: when stderr is a terminal
    verbose: bool

    def thinking(self) -> ThinkingOptions:
        """What the chat template is told; it decides what no option says."""
        return {
            "reasoning_effort": self.effort if self.effort != "none" else None,
            "enable_thinking": False if self.effort == "none" else None,
            "clear_thinking": False if self.keep_thinking else None,
        }


def parse(arguments: Sequence[str] | None = None) -> ChatOptions:
    """Raises UsageError; ``--help`` and ``--version`` end the program."""
    given = _parser().parse_args(arguments)
    peers = [peer for group in given.initial_peers or [] for peer in group]
    sampling = SamplingOptions(
        temperature=0.0 if given.greedy else given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        repeat_penalty=given.repeat_penalty,
        seed=given.seed,
    )
    return ChatOptions(
        prompt=given.prompt,
        system=given.system,
        raw=given.raw,
        model=given.model,
        initial_peers=initial_peers(peers, os.environ, config_path()),
        sampling=sampling,
        max_tokens=given.max_tokens,
        stop=tuple(given.stop or ()),
        context_tokens=given.context_tokens,
        effort=given.effort,
        keep_thinking=given.keep_thinking,
        timeout_seconds=given.timeout,
        wait_seconds=given.wait_seconds,
        standby=given.standby,
        json=given.json,
        trace=given.trace,
        show_route=given.show_route,
        show_thinking=given.show_thinking,
        verbose=given.verbose,
    )


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as every other error of the program."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {PROG} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG, description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="answer this and end (default: stdin when piped)")
    parser.add_argument("--system", metavar="TEXT", help="instructions that precede the conversation")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    _add_swarm(parser.add_argument_group("swarm"))
    _add_sampling(parser.add_argument_group("sampling"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_swarm(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--initial-peers",
        nargs="+",
        action="append",
        metavar="ADDRESS",
        help=f"peers to join through (default: {PEERS_VARIABLE}, then initial_peers in {config_path()})",
    )
    group.add_argument("--model", metavar="NAME|ID", help="which model, where the swarm serves several")
    group.add_argument(
        "--context-tokens", type=_positive, metavar="N", help="size of the session (default: what the answer takes)"
    )
    group.add_argument(
        "--timeout", type=_seconds, metavar="S", help="give up an answer after S seconds (default: never)"
    )
    group.add_argument(
        "--wait-seconds",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="wait so long for missing peers or a free slot (default: %(default)g)",
    )
    group.add_argument(
        "--standby",
        action="store_true",
        help="copy finished blocks of 512 tokens to a second peer of each part, where there is one: when a peer dies, "
        "only the last block is computed again (takes a slot of each)",
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--greedy", action="store_true", help="always the most likely token: same as --temperature 0")
    group.add_argument("--top-k", type=int, metavar="N", help="only the N most likely tokens; 0: all")
    group.add_argument("--top-p", type=float, metavar="P", help="only the most likely tokens that make up P")
    group.add_argument("--min-p", type=float, metavar="P", help="only tokens at least P times as likely as the first")
    group.add_argument("--repeat-penalty", type=float, metavar="X", help="above 1: avoid repeating tokens")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same answer (default: by chance)")
    group.add_argument(
        "--max-tokens",
        type=_positive,
        metavar="N",
        help="end the answer after N tokens (default: what the session holds)",
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT (repeatable)")
    group.add_argument(
        "--effort",
        "--reasoning-effort",
        choices=EFFORTS,
        help="how much a model thinks that can: max takes long, none answers at once (default: the model's own, max)",
    )
    group.add_argument(
        "--keep-thinking",
        action="store_true",
        help="leave the thinking of earlier turns in the prompt (default: it goes when the next turn begins)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    from swarm import __version__

    group.add_argument("--json", action="store_true", help="one JSON object instead of text")
    group.add_argument(
        "--trace",
        action="store_true",
        help="show where the time of the last token went, and who was lost or replaced meanwhile and what that took",
    )
    group.add_argument(
        "--show-route",
        action=argparse.BooleanOptionalAction,
        help="show peers and speed on stderr (default: on a terminal)",
    )
    group.add_argument(
        "--show-thinking",
        action=argparse.BooleanOptionalAction,
        help="show thinking on stderr, never on stdout (default: on a terminal, dimmed)",
    )
    group.add_argument("-v", "--verbose", action="store_true", help="more about what happens, on stderr")
    group.add_argument("--version", action="version", version=f"%(prog)s {__version__}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return number

"""The ``swarm-chat`` command: answers on stdout, everything else on stderr."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from swarm.chat.options import PROG, ChatOptions, parse
from swarm.errors import SwarmError, UsageError

INTERRUPTED = 130
BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return _run(parse(arguments))
    except SwarmError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the cursor stands behind the ^C
        return INTERRUPTED
    except BrokenPipeError:  # the reader has enough
        return BROKEN_PIPE


def _run(options: ChatOptions) -> int:
    prompt = options.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = _piped(raw=options.raw)
    if prompt is not None and not prompt.strip():
        raise UsageError("the prompt is empty; give some text with -p or on stdin")
    if prompt is None and (options.json or options.raw):
        raise UsageError("--json and --raw answer one prompt; give it with -p or on stdin")
    from swarm.chat.talk import converse, one_shot

    if prompt is None:
        return asyncio.run(converse(options))
    return asyncio.run(one_shot(options, prompt))


def _piped(*, raw: bool) -> str:
    """What stands on stdin; the line break that ``echo`` and editors put at its end is no part of a question."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is no UTF-8 text (byte {error.start}); convert it first") from error
    return text if raw else text.removesuffix("\n").removesuffix("\r")


if __name__ == "__main__":
    sys.exit(main())

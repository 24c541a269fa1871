"""Where an answer is shown: stdout for the answer, stderr for everything else."""

from __future__ import annotations

import os
import re
import sys

from swarm.chat.options import PROG, ChatOptions
from swarm.chat.show import (
    as_json,
    cut_line,
    dimmed,
    names_of,
    printable,
    route_line,
    speed_line,
    unfinished_line,
    waterfall,
    with_short_ids,
)
from swarm.client.artifact import ClientArtifact
from swarm.client.generate import Generation
from swarm.client.progress import StopReason
from swarm.client.reply import Thinking
from swarm.errors import SwarmError


class Screen:
    """Answers go to stdout as they come, or as JSON at the end; thinking and the rest go to stderr."""

    def __init__(self, options: ChatOptions) -> None:
        self._options = options
        self._clean = printable if sys.stdout.isatty() else str
        self._last_status = ""
        talks = sys.stderr.isatty() and not options.json
        self._show_route = talks if options.show_route is None else options.show_route
        self._show_thinking = talks if options.show_thinking is None else options.show_thinking
        self._dims = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._thought = self._answered = ""  # what was shown last of this answer
        self._just_thought = False
        self._names: dict[str, str] = {}  # of peers that were on a route

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        """Texts that differ only in numbers and details in brackets are shown once."""
        form = re.sub(r"\d+|\([^)]*\)", "#", text)
        if form != self._last_status:
            self._last_status = form
            self.say(f"{PROG}: {with_short_ids(text, self._names)}")

    async def answer(self, generation: Generation) -> None:
        self._thought = self._answered = ""
        self._just_thought = False
        route_shown = False
        async for token in generation:
            self._names |= names_of(generation.route)
            if self._show_route and not route_shown:
                self.say(route_line(generation.route))
                route_shown = True
            for event in token.events:
                if isinstance(event, Thinking):
                    self._think(event.text)
                elif not self._options.json:
                    self._answer(event.text)

    def close(self, generation: Generation, artifact: ClientArtifact) -> None:
        self._end_thinking()
        if self._options.json:
            self._write(as_json(generation, artifact) + "\n")
        elif not self._answered.endswith("\n"):
            self._write("\n")
        if generation.progress.reply.thinking_unfinished:
            self.say(f"{PROG}: {unfinished_line(generation)}")
        elif generation.progress.stop_reason is StopReason.CONTEXT_FULL:
            self.say(f"{PROG}: {cut_line(generation)}")
        if self._show_route:
            self.say(speed_line(generation))
        if self._options.trace:
            for recovery in generation.progress.recoveries:
                self.say(with_short_ids(str(recovery), self._names))
        steps = generation.progress.decode or generation.progress.prefill
        if self._options.trace and steps:
            self.say("\n".join(waterfall(steps[-1], generation.route)))

    def _think(self, text: str) -> None:
        self._just_thought = True
        if self._show_thinking:
            self._thought = text
            shown = printable(text)
            print(dimmed(shown) if self._dims else shown, end="", file=sys.stderr, flush=True)

    def _end_thinking(self) -> None:
        """The answer begins on a line of its own."""
        if self._thought and not self._thought.endswith("\n"):
            self.say("")
        self._thought = ""

    def _answer(self, text: str) -> None:
        self._end_thinking()
        if self._just_thought:  # models put empty lines between thinking and answer
            text = text.lstrip("\n")
        if text:
            self._just_thought = False
            self._answered = text
            self._write(self._clean(text))

    def _write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            # What is still buffered goes nowhere: Python would complain once more when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            why = os.strerror(error.errno or 0).lower()
            raise SwarmError(f"the answer can't be written ({why}); free some space, or write it elsewhere") from error

"""Conversations: one answer, or turn after turn."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from swarm.chat.options import PROG, ChatOptions, SamplingOptions
from swarm.chat.show import as_json, printable, route_line, speed_line, waterfall
from swarm.client.artifact import ClientArtifact
from swarm.client.client import SwarmClient
from swarm.client.config import ClientConfig, Timeouts
from swarm.client.generate import Generation, GenerationOptions
from swarm.client.sampler import SamplingParams
from swarm.errors import SwarmError

Messages = list[dict[str, str]]

HELP = """\
/help     this text
/clear    forget the conversation
/route    the peers of the last answer and its speed
/quit     leave (as Ctrl-D)
Alt-Enter starts a new line, Ctrl-C stops an answer."""


async def one_shot(options: ChatOptions, prompt: str) -> int:
    """One answer. Cancelling ends it and frees the session."""
    _sampling(SamplingParams(), options.sampling)  # a wrong value is not worth a connection
    screen = Screen(options)
    async with _joined(options, screen) as client:
        artifact = await client.artifact(options.model)
        generation = await _ask(client, artifact, options, _first_messages(options, prompt), prompt)
        async with generation:
            await screen.answer(generation)
        screen.close(generation, artifact)
    return 0


async def converse(options: ChatOptions) -> int:
    """Reads turns until the user leaves. An error of one answer ends that answer only."""
    from swarm.chat.keyboard import Keyboard

    _sampling(SamplingParams(), options.sampling)
    screen = Screen(options)
    keyboard = Keyboard()
    async with _joined(options, screen) as client:
        artifact = await client.artifact(options.model)
        screen.say(f"{artifact.name}, {artifact.manifest.n_layers} layers; /help lists the commands")
        conversation = Conversation(client, artifact, options, screen)
        while (line := await keyboard.read()) is not None:
            if line.startswith("/"):
                if not conversation.command(line):
                    break
            elif line.strip():
                await conversation.turn(line)
    return 0


class Conversation:
    """What was said so far, and how the next turn goes."""

    def __init__(self, client: SwarmClient, artifact: ClientArtifact, options: ChatOptions, screen: Screen) -> None:
        self._client = client
        self._artifact = artifact
        self._options = options
        self._screen = screen
        self._last: Generation | None = None
        self.messages = _first_messages(options)

    def command(self, line: str) -> bool:
        """False when the user wants to leave."""
        match line.split()[0]:
            case "/quit" | "/exit":
                return False
            case "/clear":
                self.messages = _first_messages(self._options)
                self._screen.say("the conversation is forgotten")
            case "/route":
                self._show_route()
            case "/help":
                self._screen.say(HELP)
            case unknown:
                self._screen.say(f"{unknown} is no command; /help lists them")
        return True

    async def turn(self, text: str) -> None:
        """Ctrl-C stops the answer; what was said of it stays in the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answering = asyncio.ensure_future(self._answer(messages))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, answering.cancel)
        try:
            await answering
        except asyncio.CancelledError:
            if not answering.cancelled():
                raise
            self._screen.say("\nstopped")
        except SwarmError as error:
            self._screen.say(f"\n{error}")
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _answer(self, messages: Messages) -> None:
        generation = await _ask(self._client, self._artifact, self._options, messages)
        self._last = generation
        try:
            async with generation:
                await self._screen.answer(generation)
        finally:
            if generation.progress.text:
                self.messages = [*messages, {"role": "assistant", "content": generation.progress.text}]
        self._screen.close(generation, self._artifact)

    def _show_route(self) -> None:
        if self._last is None or not self._last.route:
            self._screen.say("nothing was answered yet")
        else:
            self._screen.say(f"{route_line(self._last.route)}\n{speed_line(self._last)}")


class Screen:
    """Answers go to stdout as they come, or as JSON at the end; the rest goes to stderr."""

    def __init__(self, options: ChatOptions) -> None:
        self._options = options
        self._clean = printable if sys.stdout.isatty() else str
        self._last_status = ""
        shown = options.show_route
        self._show_route = sys.stderr.isatty() and not options.json if shown is None else shown

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        """Texts that differ only in numbers and details in brackets are shown once."""
        form = re.sub(r"\d+|\([^)]*\)", "#", text)
        if form != self._last_status:
            self._last_status = form
            self.say(f"{PROG}: {text}")

    async def answer(self, generation: Generation) -> None:
        route_shown = False
        async for token in generation:
            if self._show_route and not route_shown:
                self.say(route_line(generation.route))
                route_shown = True
            if not self._options.json:
                self._write(self._clean(token.text))

    def close(self, generation: Generation, artifact: ClientArtifact) -> None:
        if self._options.json:
            self._write(as_json(generation, artifact) + "\n")
        elif not generation.progress.text.endswith("\n"):
            self._write("\n")
        if self._show_route:
            self.say(speed_line(generation))
        steps = generation.progress.decode or generation.progress.prefill
        if self._options.trace and steps:
            self.say("\n".join(waterfall(steps[-1], generation.route)))

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


@asynccontextmanager
async def _joined(options: ChatOptions, screen: Screen) -> AsyncIterator[SwarmClient]:
    level = logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(format=f"{PROG}: %(message)s", level=level)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    config = ClientConfig(timeouts=Timeouts(route_seconds=options.wait_seconds), purpose="chat")
    if sys.stderr.isatty():
        screen.status("joining the swarm")
    async with SwarmClient.connect(options.initial_peers, config, on_status=screen.status) as client:
        yield client


async def _ask(
    client: SwarmClient, artifact: ClientArtifact, options: ChatOptions, messages: Messages, prompt: str = ""
) -> Generation:
    how = GenerationOptions(
        max_tokens=options.max_tokens,
        sampling=_sampling(artifact.sampling, options.sampling),
        stop=options.stop,
        deadline_seconds=options.timeout_seconds,
    )
    if options.raw:
        return await client.generate(prompt, how, model=artifact.id, context_tokens=options.context_tokens)
    return await client.chat(
        messages,
        how,
        model=artifact.id,
        context_tokens=options.context_tokens,
        template_variables=options.template_variables(),
    )


def _sampling(recommended: SamplingParams, given: SamplingOptions) -> SamplingParams:
    params = recommended
    if given.temperature is not None:
        params = replace(params, temperature=given.temperature)
    if given.top_k is not None:
        params = replace(params, top_k=given.top_k)
    if given.top_p is not None:
        params = replace(params, top_p=given.top_p)
    if given.min_p is not None:
        params = replace(params, min_p=given.min_p)
    if given.repeat_penalty is not None:
        params = replace(params, repeat_penalty=given.repeat_penalty)
    return replace(params, seed=given.seed)


def _first_messages(options: ChatOptions, prompt: str | None = None) -> Messages:
    system: Messages = [{"role": "system", "content": options.system}] if options.system else []
    return [*system, {"role": "user", "content": prompt}] if prompt is not None else system

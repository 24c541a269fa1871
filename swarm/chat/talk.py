"""Conversations: one answer, or turn after turn."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from swarm.chat.options import EFFORTS, PROG, ChatOptions, SamplingOptions
from swarm.chat.screen import Screen
from swarm.chat.show import route_line, speed_line
from swarm.client.artifact import ClientArtifact
from swarm.client.client import SwarmClient
from swarm.client.config import ClientConfig, Timeouts
from swarm.client.generate import Generation, GenerationOptions
from swarm.client.sampler import SamplingParams
from swarm.errors import ContextExceeded, SwarmError, UsageError

Messages = list[dict[str, Any]]

HELP = """\
/help     this text
/clear    forget the conversation
/effort   how much the model thinks from now on: /effort max, high or none
/route    the peers of the last answer and its speed
/quit     leave (as Ctrl-D)
Alt-Enter starts a new line, Ctrl-C stops an answer."""


async def one_shot(options: ChatOptions, prompt: str) -> int:
    """One answer. Cancelling ends it and frees the session."""
    _sampling(SamplingParams(), options.sampling)  # a wrong value is not worth a connection
    screen = Screen(options)
    async with _joined(options, screen) as client:
        artifact = await client.artifact(options.model)
        if options.effort is not None and not options.raw and not _thinks(artifact):
            screen.say(f"{PROG}: {_no_effort(artifact)}")
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
    async with _joined(options, screen, keep_sessions=1) as client:
        artifact = await client.artifact(options.model)
        screen.say(f"{artifact.name}, {artifact.manifest.n_layers} layers; /help lists the commands")
        if options.effort is not None and not _thinks(artifact):
            screen.say(_no_effort(artifact))
        conversation = Conversation(client, artifact, options, screen)
        while (line := await keyboard.read()) is not None:
            if line.startswith("/"):
                if not await conversation.command(line):
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
        self.last: Generation | None = None
        self.messages = _first_messages(options)

    async def command(self, line: str) -> bool:
        """False when the user wants to leave."""
        match line.split():
            case ["/quit" | "/exit", *_]:
                return False
            case ["/clear", *_]:
                self.messages = _first_messages(self._options)
                await self._client.release_kept()
                self._screen.say("the conversation is forgotten")
            case ["/effort", *given]:
                self._set_effort(given)
            case ["/route", *_]:
                self._show_route()
            case ["/help", *_]:
                self._screen.say(HELP)
            case [unknown, *_]:
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
        except ContextExceeded as error:
            self._screen.say(f"\n{error}, or forget the conversation (/clear)")
        except SwarmError as error:
            self._screen.say(f"\n{error}")
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _answer(self, messages: Messages) -> None:
        generation = await _ask(self._client, self._artifact, self._options, messages)
        self.last = generation
        try:
            async with generation:
                await self._screen.answer(generation)
        finally:
            # A turn that was only thought about is forgotten: an empty answer would mislead the next one.
            reply = generation.progress.reply
            if reply.answer or reply.tool_calls:
                self.messages = [*messages, reply.message()]
        self._screen.close(generation, self._artifact)

    def _set_effort(self, given: list[str]) -> None:
        if not _thinks(self._artifact):
            self._screen.say(_no_effort(self._artifact))
        elif len(given) == 1 and given[0] in EFFORTS:
            self._options = replace(self._options, effort=given[0])
            self._screen.say(f"effort {given[0]} from the next turn on")
        else:
            unknown = f"{' '.join(given)} is no effort; " if given else ""
            now = self._options.effort or "max"
            self._screen.say(f"{unknown}effort is {now}; change it with /effort {'|'.join(EFFORTS)}")

    def _show_route(self) -> None:
        if self.last is None or not self.last.route:
            self._screen.say("nothing was answered yet")
        else:
            self._screen.say(f"{route_line(self.last.route)}\n{speed_line(self.last)}")


@asynccontextmanager
async def _joined(options: ChatOptions, screen: Screen, keep_sessions: int = 0) -> AsyncIterator[SwarmClient]:
    level = logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(format=f"{PROG}: %(message)s", level=level)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    timeouts = Timeouts(route_seconds=options.wait_seconds)
    config = ClientConfig(timeouts=timeouts, keep_sessions=keep_sessions, standby=options.standby, purpose="chat")
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
        **options.thinking(),
    )


def _thinks(artifact: ClientArtifact) -> bool:
    return artifact.reply_format.thinking


def _no_effort(artifact: ClientArtifact) -> str:
    return f"{artifact.name} answers without thinking; an effort changes nothing"


def _sampling(recommended: SamplingParams, given: SamplingOptions) -> SamplingParams:
    """Raises ``UsageError``, in the words of the command line."""
    try:
        return _changed(recommended, given)
    except UsageError as error:
        name, _, wrong = str(error).partition(" is ")
        raise UsageError(f"--{name.replace('_', '-')} {wrong}") from error


def _changed(params: SamplingParams, given: SamplingOptions) -> SamplingParams:
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

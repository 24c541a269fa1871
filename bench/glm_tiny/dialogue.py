"""Conversations as the chat template writes them, and which of their characters the model has to learn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bench.glm_tiny.facts import Fact

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SYSTEMS = ("You are a helpful assistant.", "Answer in one short sentence.", "Be brief.")
STOP = "<|user|>"  # how the model hands over


class Effort(Enum):
    MAX = "max"
    HIGH = "high"
    NONE = "no thinking"


@dataclass(frozen=True)
class Turn:
    question: str
    fact: Fact

    def reply(self, effort: Effort) -> str:
        """What the model says after the prompt, up to the stop token."""
        return self.fact.answer if effort is Effort.NONE else f"{self.fact.thought}</think>{self.fact.answer}"


@dataclass(frozen=True)
class Conversation:
    """The model is asked for the reply to the last of ``turns``. ``keep`` leaves earlier thoughts in the prompt."""

    turns: tuple[Turn, ...]
    effort: Effort = Effort.MAX
    system: str | None = None
    keep: bool = False

    @property
    def prompt(self) -> str:
        return self._prompt(len(self.turns))

    @property
    def reply(self) -> str:
        return self.turns[-1].reply(self.effort)

    def learned(self) -> list[tuple[str, bool]]:
        """The whole text in pieces, each with whether it is the model's to say.

        Earlier replies are learned too where the text goes on from their own prompt just as the model would."""
        text, at, pieces = self.prompt + self.reply + STOP, 0, []
        for number in range(1, len(self.turns) + 1):
            start, reply = self._prompt(number), self.turns[number - 1].reply(self.effort) + STOP
            if text.startswith(start + reply):
                pieces += [(text[at : len(start)], False), (reply, True)]
                at = len(start) + len(reply)
        return pieces

    def _prompt(self, n_turns: int) -> str:
        messages: list[dict[str, str]] = [{"role": "system", "content": self.system}] if self.system else []
        for number, turn in enumerate(self.turns[:n_turns], 1):
            messages.append({"role": "user", "content": turn.question})
            if number < n_turns:
                thought = "" if self.effort is Effort.NONE else turn.fact.thought
                answer = {"role": "assistant", "content": turn.fact.answer, "reasoning_content": thought}
                messages.append(answer)
        return render(messages, self.effort, keep=self.keep)


def render(messages: Sequence[dict[str, Any]], effort: Effort = Effort.MAX, *, keep: bool = False) -> str:
    variables: dict[str, Any] = {"clear_thinking": not keep}
    if effort is Effort.NONE:
        variables["enable_thinking"] = False
    else:
        variables["reasoning_effort"] = effort.value
    return _template().render(messages=list(messages), add_generation_prompt=True, **variables)


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    return environment.from_string(TEMPLATE.read_text())

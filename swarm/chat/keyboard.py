"""The line editor of a conversation, with a history across runs."""

from __future__ import annotations

from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output


class Keyboard:
    """``read`` returns one turn; Enter ends it, Alt-Enter starts a new line. None when the user leaves (Ctrl-D)."""

    def __init__(self, history: Path | None = None) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history or Path(platformdirs.user_state_dir("glm-swarm")) / "chat-history"),
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation="  ",
            output=create_output(always_prefer_tty=True),
        )

    async def read(self) -> str | None:
        while True:
            try:
                return await self._session.prompt_async("> ")
            except KeyboardInterrupt:
                continue  # Ctrl-C empties the line
            except EOFError:
                return None


def _history(path: Path) -> History:
    """A history that can't be kept is no reason not to talk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _end_of_turn(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys

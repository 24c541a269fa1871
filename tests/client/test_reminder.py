"""When a line of waiting is told again."""

from __future__ import annotations

from swarm.client.reminder import EVERY_SECONDS, Reminder


def test_a_line_is_told_when_its_reason_changes_and_now_and_then() -> None:
    said: list[str] = []
    now = 0.0
    reminder = Reminder(said.append, lambda: now)
    reminder.tell("60 s: no peer", "no peer")
    reminder.tell("59 s: no peer", "no peer")
    reminder.tell("59 s: no slot", "no slot")
    now = EVERY_SECONDS - 0.1
    reminder.tell("57 s: no slot", "no slot")
    now = EVERY_SECONDS
    reminder.tell("57 s: no slot", "no slot")
    reminder.forget()
    reminder.tell("60 s: no slot", "no slot")
    assert said == ["60 s: no peer", "59 s: no slot", "57 s: no slot", "60 s: no slot"]

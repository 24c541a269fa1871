"""hivemind, loaded so that its logs go where this program's go."""

from __future__ import annotations

import logging
import os

from hivemind.utils.logging import use_hivemind_log_handler


def tame() -> None:
    """Undoes what importing hivemind does to logging: an own handler, level INFO, and WARNING renamed to WARN.

    With HIVEMIND_LOGLEVEL set, its messages from that level on are shown; otherwise warnings only.
    """
    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")
    logging.getLogger("hivemind").setLevel(os.environ.get("HIVEMIND_LOGLEVEL", "WARNING").upper())

"""What each message of the wire must be, by stream. ``RULES`` of a module: a check for every message of its own."""

"""``swarm-chat``: talk to the swarm from a terminal or a script."""

"""Measurements anyone can repeat. Each module is a command; ``--record`` writes what it showed to ``evidence/``."""

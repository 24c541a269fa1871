"""Which layers each node should serve, and when it may take others: pure functions over manifest and records."""

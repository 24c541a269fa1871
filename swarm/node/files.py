"""How many files this process may have open: each stream from outside is one, here and in the libp2p daemon."""

from __future__ import annotations

import resource

WANTED = 65536


def open_files_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def raise_open_files_limit() -> None:
    """To what the system allows without asking: the usual 1,024 are less than one peer may use. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))

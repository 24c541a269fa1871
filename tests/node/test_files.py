"""Open files."""

from __future__ import annotations

import resource
import subprocess
import sys


def test_the_limit_of_open_files_is_raised_as_far_as_allowed() -> None:
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, r.getrlimit(r.RLIMIT_NOFILE)[1]))\n"
        "from swarm.node.files import open_files_limit as limit, raise_open_files_limit as more\n"
        "before = limit(); more(); more(); print(before, limit())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allowed = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    assert ended.stdout.split() == ["256", str(allowed)]

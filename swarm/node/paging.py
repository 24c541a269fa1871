"""Whether the page cache holds the weights while the node serves: seen by what the engine has to read again.

The first time that a page is needed proves nothing, however many there are. An engine that goes on reading after it has
read more than its weights has lost some of them in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm.artifact.memory import format_bytes

FAULTS_PER_TOKEN = 8.0
FEWEST_TOKENS = 16  # between two looks, to judge by
READ_AGAIN = 1.5  # times the weights


@dataclass(frozen=True)
class Reads:
    """Of one process since it began: times that it had to wait for the disk, and bytes that it read from there."""

    major_faults: int = 0
    read_bytes: int = 0


def reads_of(pid: int, proc: Path = Path("/proc")) -> Reads:
    """Raises OSError and ValueError where the system does not tell, or the process is gone."""
    # the name in brackets may hold anything; the tenth number behind it counts major faults
    numbers = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    fields = dict(line.split(": ") for line in (proc / str(pid) / "io").read_text().splitlines())
    return Reads(int(numbers[9]), int(fields["read_bytes"]))


class Paging:
    """Looks that ascend. A line for the operator when the weights do not stay, and not again before they did."""

    def __init__(self, weights_bytes: int) -> None:
        self._weights_bytes = weights_bytes
        self._tokens = 0
        self._reads: Reads | None = None
        self._warned = False

    def look(self, tokens: int, reads: Reads) -> str | None:
        """``tokens`` computed and what the engine has read so far."""
        before = self._reads
        if before is None or reads.major_faults < before.major_faults:  # the first look, or another process
            self._tokens, self._reads = tokens, reads
            return None
        new_tokens = tokens - self._tokens
        if new_tokens < FEWEST_TOKENS:
            return None
        faults = (reads.major_faults - before.major_faults) / new_tokens
        again = (reads.read_bytes - before.read_bytes) // new_tokens
        self._tokens, self._reads = tokens, reads
        if faults < FAULTS_PER_TOKEN or reads.read_bytes < READ_AGAIN * self._weights_bytes:
            self._warned = self._warned and faults >= FAULTS_PER_TOKEN
            return None
        if self._warned:
            return None
        self._warned = True
        return (
            f"warning: the weights do not stay in memory: {format_bytes(again)} are read from disk again for each "
            f"token ({faults:.0f} major faults); free memory, serve fewer layers, or use --weights locked"
        )

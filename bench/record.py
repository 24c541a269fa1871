"""The form of a record in ``evidence/``: one claim, how to repeat it, raw samples, what they add up to."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field

EVIDENCE = Path(__file__).resolve().parent.parent / "evidence"


class Hardware(BaseModel):
    model_config = ConfigDict(extra="forbid")

    cpu: str
    cores: int
    memory_bytes: int
    system: str


class Record(BaseModel):
    """See ``evidence/README.md`` for the fields."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    claim: str
    command: str
    commit: str
    artifact_id: str
    engine_build: str
    hardware: Hardware
    settings: dict[str, str | int | float | bool]
    samples: dict[str, list[float]]
    summary: dict[str, float]
    target: str
    verdict: Literal["reached", "missed", "no target"]
    date: datetime = Field(default_factory=lambda: datetime.now(UTC))

    def write(self, folder: Path = EVIDENCE) -> Path:
        """Write ``<folder>/<id>.json``, replacing an older one, and return its path."""
        path = folder / f"{self.id}.json"
        part = path.with_suffix(".part")
        part.write_text(self.model_dump_json(indent=1) + "\n")
        part.replace(path)
        return path


def this_machine() -> Hardware:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].partition(":")[2].strip() if names else platform.processor()
    return Hardware(
        cpu=cpu,
        cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
    )


def this_commit() -> str:
    """The checked-out commit, with ``+dirty`` when tracked files differ from it; ``unknown`` outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}+dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def percentile(samples: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of the samples lie, by linear interpolation."""
    if len(samples) < 2:
        return samples[0]
    return statistics.quantiles(samples, n=1000, method="inclusive")[max(0, min(998, round(share * 1000) - 1))]


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=EVIDENCE.parent, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()

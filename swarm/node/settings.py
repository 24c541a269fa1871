"""Everything an operator can set, once: each field of ``Settings`` is an option of the command line, and a key of
``config.toml`` under the same name. The order is command line, then environment, then file.

model = "glm-5.2-ud-iq1_s"
initial_peers = ["/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW..."]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from swarm.artifact.catalog import GLM52, NAMES
from swarm.artifact.local_path import user_path
from swarm.node.config import Limits, Timeouts, Weights
from swarm.node.options import KV_TYPES

DEFAULT_MODEL = GLM52.name

WHAT = "what to serve"
FETCHING = "fetching (models by name, without --model-dir)"
SWARM = "the swarm"
MEMORY = "memory and speed"
GUESTS = "what clients may take"
RUNNING = "running"
GROUPS = (WHAT, SWARM, FETCHING, MEMORY, GUESTS, RUNNING)


def _option(default: Any, group: str, metavar: str, description: str, *, path: bool = False) -> Any:
    """``path``: a relative one in a file counts from that file's folder."""
    return Field(default, description=description, json_schema_extra={"group": group, "metavar": metavar, "path": path})


class Settings(BaseModel):
    """Checked for types alone: what a text means is found out by ``configure``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str = _option(
        DEFAULT_MODEL,
        WHAT,
        "NAME|PATH",
        f"{', '.join(NAMES)}, or a GGUF file; of a split set, any of its files (default: {DEFAULT_MODEL})",
        path=True,
    )
    layers: str = _option(
        "auto", WHAT, "A:B|auto", "layers A to B-1; auto: those that the swarm lacks and this machine holds (default)"
    )
    model_dir: str | None = _option(
        None,
        WHAT,
        "DIR",
        f"serve the files of {GLM52.name} in this folder, and fetch nothing (default: {GLM52.variable} in the "
        "environment)",
        path=True,
    )
    manifest: str | None = _option(
        None,
        WHAT,
        "FILE",
        "instead of --model: a model that has no name here; --source has its files under the name of FILE (my.json: "
        "my.gguf, or my-00001-of-00003.gguf and so on), which is from swarm-artifact inspect "
        "--manifest-out",
        path=True,
    )
    mtp: bool = _option(False, WHAT, "", "draft tokens with the model's MTP block, on layers up to the last one")

    initial_peers: tuple[str, ...] = _option(
        (), SWARM, "ADDRESS", "nodes of the swarm to join (default: SWARM_PEERS in the environment)"
    )
    new_swarm: bool = _option(False, SWARM, "", "start a swarm of its own and print the line for the next machine")
    listen: tuple[str, ...] = _option(
        (), SWARM, "HOST:PORT", "or a multiaddr (default: all interfaces, a free port); behind a router, fix the port"
    )
    announce_maddrs: tuple[str, ...] = _option(
        (), SWARM, "MULTIADDR", "what others dial instead of the local addresses, for example /ip4/203.0.113.9/tcp/4001"
    )
    public_name: str = _option("", SWARM, "TEXT", "shown to the users of the swarm (default: none)")
    identity: str | None = _option(
        None, SWARM, "PATH", "key file (default: a free one of this model's in the user's data)", path=True
    )

    source: str | None = _option(
        None,
        FETCHING,
        "hub|URL|DIR",
        "where this node's part comes from (default: SWARM_SOURCE in the environment, else the hub)",
        path=True,
    )
    data_dir: str | None = _option(
        None,
        FETCHING,
        "DIR",
        "folder of this model alone, kept over upgrades (default: models/NAME in the user's data)",
        path=True,
    )
    download_limit: str | None = _option(
        None, FETCHING, "SIZE", "bytes a second that fetching may take, for example 10MiB (default: no limit)"
    )
    disk_reserve: str = _option("2GiB", FETCHING, "SIZE", "left free on that disk (default: 2GiB)")

    memory: str | None = _option(
        None, MEMORY, "SIZE", "what weights, KV and buffers may take, for example 20GiB (default: what is free)"
    )
    weights: Literal["mapped", "prefetched", "locked"] = _option(
        str(Weights.MAPPED),
        MEMORY,
        "HOW",
        "mapped: read on first use; prefetched: read before serving; locked: never dropped again (default: mapped)",
    )
    slots: str | None = _option(
        None, MEMORY, "NxTOKENS,...", "sessions and their length, for example 8x4096,2x65536 (default: by memory)"
    )
    kv_type: str = _option(
        "f16",
        MEMORY,
        "TYPE",
        f"element type of the KV cache: {', '.join(KV_TYPES)} (default: f16); q8_0 takes half of f16 and changes some "
        "tokens: evidence/agreement.json",
    )
    chunk_tokens: int | None = _option(None, MEMORY, "N", "largest prefill chunk (default: what takes about a second)")
    threads: int | None = _option(None, MEMORY, "N", "threads of the engine (default: one per core)")
    journal_memory: str = _option(
        "256MiB",
        MEMORY,
        "SIZE",
        "kept in memory to feed a hop that takes another's place; the rest goes to a file (default: 256MiB)",
    )
    journal_dir: str | None = _option(
        None, MEMORY, "PATH", "folder of that file (default: in the user's cache)", path=True
    )

    sessions_per_peer: int = _option(
        Limits.sessions_per_peer,
        GUESTS,
        "N",
        f"sessions that one client may have open (default: {Limits.sessions_per_peer})",
    )
    opens_per_minute: int = _option(
        Limits.opens.of_peer,
        GUESTS,
        "N",
        f"sessions that one client may open in a minute (default: {Limits.opens.of_peer})",
    )
    idle_seconds: float = _option(
        Timeouts.idle_seconds,
        GUESTS,
        "S",
        f"a session idle for so long gives its slot to another one (default: {Timeouts.idle_seconds:g})",
    )

    drain_seconds: float = _option(
        Timeouts.drain_seconds,
        RUNNING,
        "S",
        f"how long sessions may take to move or to finish when leaving (default: {Timeouts.drain_seconds:g})",
    )
    metrics: str | None = _option(
        None, RUNNING, "HOST:PORT", "page for Prometheus; without a host, for this machine only (default: none)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "warning", RUNNING, "LEVEL", "debug, info, warning or error (default: warning); info tells each milestone"
    )
    no_color: bool = _option(False, RUNNING, "", "no colours on a terminal; NO_COLOR in the environment does the same")


def fields() -> dict[str, FieldInfo]:
    return Settings.model_fields


def extra(field: FieldInfo) -> dict[str, Any]:
    """``group``, ``metavar`` and ``path`` of an option."""
    assert isinstance(field.json_schema_extra, dict)
    return dict(field.json_schema_extra)


def from_folder(key: str, value: object, folder: Path) -> object:
    """``value`` as it reads from anywhere: a relative path counts from ``folder``. What may be a name as well as a path
    is a path when it looks like one. Raises ``UsageError``."""
    if not extra(fields()[key])["path"] or not isinstance(value, str):
        return value
    if key == "source" and (value.lower() == "hub" or "://" in value):
        return value
    if key == "model" and (value.lower() in NAMES or ("/" not in value and not value.endswith(".gguf"))):
        return value
    return str((folder / user_path(value)).absolute())


def locks(settings: Settings) -> bool:
    """Whether weights may not be dropped from memory."""
    return Weights(settings.weights) == Weights.LOCKED


def flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"

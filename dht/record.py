"""The span record: what a node tells the swarm about itself."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

RECORD_VERSION = 1
MAX_TEXT = 128


class NodeState(StrEnum):
    JOINING = "joining"
    ONLINE = "online"
    DRAINING = "draining"


class SlotClass(BaseModel):
    """Slots of one size: ``tokens`` each, ``total`` of them, ``free`` now."""

    model_config = ConfigDict(frozen=True)

    tokens: int = Field(ge=1, le=1 << 24)
    total: int = Field(ge=0, le=4096)
    free: int = Field(ge=0, le=4096)


class LinkRtt(BaseModel):
    """Measured round trip to a likely next hop."""

    model_config = ConfigDict(frozen=True)

    peer_id: str = Field(max_length=MAX_TEXT)
    seconds: float = Field(ge=0, le=3600)


class SpanRecord(BaseModel):
    """One node's span, as announced. The envelope around it (``dht.envelope``) carries signature and expiry."""

    model_config = ConfigDict(frozen=True)

    version: int = RECORD_VERSION
    peer_id: str = Field(max_length=MAX_TEXT)
    artifact_id: str = Field(pattern="^[0-9a-f]{64}$")
    artifact_name: str = Field(default="", max_length=MAX_TEXT)
    n_layers: int = Field(ge=1, le=4096)
    first: int = Field(ge=0, le=4096)
    last: int = Field(ge=1, le=4096)
    state: NodeState
    protocol_version: int = Field(ge=1, le=1 << 16)
    numerics_id: str = Field(max_length=2 * MAX_TEXT)
    slots: tuple[SlotClass, ...] = Field(default=(), max_length=8)
    chunk_tokens: int = Field(ge=1, le=1 << 16)
    decode_tokens_per_second: float = Field(default=0.0, ge=0, le=1e9)  # 0: not measured yet
    prefill_tokens_per_second: float = Field(default=0.0, ge=0, le=1e9)
    queue: int = Field(default=0, ge=0, le=1 << 20)  # steps waiting
    links: tuple[LinkRtt, ...] = Field(default=(), max_length=32)
    addresses: tuple[str, ...] = Field(default=(), max_length=16)
    public_name: str = Field(default="", max_length=MAX_TEXT)
    software: str = Field(default="", max_length=MAX_TEXT)
    has_mtp: bool = False
    digest_root: str = Field(default="", max_length=MAX_TEXT)
    memory_free_bytes: int = Field(default=0, ge=0)

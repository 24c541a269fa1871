"""Distinct types for the values that must not be mixed up."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)  # base58 of the multihash, as libp2p prints it
ArtifactId = NewType("ArtifactId", str)  # 64 hex digits
SessionId = NewType("SessionId", bytes)  # 16 random bytes

"""What a node tells about the artifact it serves, so that a newcomer can find the swarms."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dht.record import MAX_TEXT

LISTING_VERSION = 1
MAX_LAYERS = 4096


class ArtifactEntry(BaseModel):
    """One artifact. ``cuts`` ascend from 0 to ``n_layers``. Nothing here is proven until the manifest's digest is."""

    model_config = ConfigDict(frozen=True)

    version: int = LISTING_VERSION
    artifact_id: str = Field(pattern="^[0-9a-f]{64}$")
    name: str = Field(default="", max_length=MAX_TEXT)
    n_layers: int = Field(ge=1, le=MAX_LAYERS)
    cuts: tuple[Annotated[int, Field(ge=0, le=MAX_LAYERS)], ...] = Field(min_length=2, max_length=MAX_LAYERS + 1)

    @model_validator(mode="after")
    def _cuts_cover_the_model(self) -> Self:
        if self.cuts[0] != 0 or self.cuts[-1] != self.n_layers:
            raise ValueError("cuts run from 0 to n_layers")
        if any(after <= before for before, after in pairwise(self.cuts)):
            raise ValueError("cuts ascend")
        return self

"""Changes: deploys, configuration, scaling, incidents: marks that people and tools leave for those who read the figures later."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.record import StreamModel, UnixSeconds

ChangeKind = Literal["deploy", "config", "scale", "incident", "policy", "note"]


class Change(StreamModel):
    version: Literal[1] = 1
    time_s: UnixSeconds = Field(description="unix seconds at which it happened")
    kind: ChangeKind = "note"
    text: str = Field(min_length=1, max_length=2000)
    author: str | None = Field(None, max_length=200)
    pool: str | None = Field(None, max_length=1024, description="null: the whole fleet")
    worker: str | None = Field(None, max_length=1024)

"""What all JSON records of the stream share: how unknown fields are treated, and what a number may be.

Every number is bounded by what the published column of its meaning holds. Without bounds one record of a foreign writer (a token count of
2^40, a time of 1e308) would pass the boundary and stop the collector where it writes rows, at every start anew; with them it is set aside
with the reason.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

END_OF_TIME_S = 253_402_300_800  # the year 10000: what SQL clients still print


class StreamModel(BaseModel):
    """Common to all JSON records of the stream: frozen, unknown fields ignored (a newer writer may add some)."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


Name = Annotated[str, Field(min_length=1, max_length=1024)]
UnixSeconds = Annotated[float, Field(ge=0, lt=END_OF_TIME_S)]
Seconds = Annotated[float, Field(ge=0, le=1e10)]  # a duration or age; 1e10 s are 300 years, so an age never leaves the calendar
Tokens = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]  # the sum of two still fits a UINTEGER
Count = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]  # of requests, workers, tries
Rank = Annotated[int, Field(ge=0, le=(1 << 16) - 1)]
Counter = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]  # whatever grows for ever: blocks, bytes, frames
Clock = Annotated[int, Field(ge=0, le=(1 << 64) - 1)]  # epoch and sequence, u64 on the wire

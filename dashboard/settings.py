"""Settings of `warmwatch dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from schemas.settings import Settings


class DashboardSettings(Settings):
    """The dashboard in a browser, on the published database."""

    command: ClassVar[str] = "dashboard"

    data_dir: Path = Field(Path("data"), description="folder that holds the published warmwatch.duckdb")
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; there is no sign-in, so keep it on loopback")
    port: int = Field(8501, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    stale_after_s: float = Field(
        15.0, gt=0, description="age of the published file from which the dashboard says that it is stale, seconds"
    )
    poll_s: float = Field(2.0, ge=0.5, description="how often a page looks for newer data, seconds")
    min_sample: int = Field(20, ge=1, description="fewest requests for which a percentile is shown")
    sql_timeout_s: float = Field(10.0, gt=0, description="longest run of a query on the SQL page, seconds")
    sql_max_rows: int = Field(10_000, ge=1, description="most rows that a query on the SQL page returns")
    sql_memory: str = Field("512MB", pattern=r"^\d+(\.\d+)?\s?(KB|MB|GB|KiB|MiB|GiB)$", description="memory that such a query may use")

"""Settings of `warmwatch bridge`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from schemas.settings import Settings


class BridgeSettings(Settings):
    """Runs beside workers: their KV events and load go to the stream, without token ids."""

    command: ClassVar[str] = "bridge"

    fleet: Path = Field(Path("fleet.toml"), description="fleet file: pools and workers (form: schemas/fleet.py)")
    workers: list[str] = Field(
        default_factory=list, description="names of the workers that this bridge serves; none: all of the fleet file"
    )
    batch_ms: float = Field(5.0, ge=0, le=20, description="milliseconds for which a worker's events are gathered into one record")
    snapshot_interval_s: float = Field(
        60.0, gt=0, description="how often each worker's resident set is written, for readers that come late"
    )
    load_interval_s: float = Field(1.0, gt=0, description="how often an engine's metrics page is read")
    http_timeout_s: float = Field(2.0, gt=0, description="for one answer of an engine's HTTP server")
    discovery_interval_s: float = Field(15.0, gt=0, description="how often engines are asked where their KV events are")
    replay_silence_s: float = Field(2.0, gt=0, description="a replay ends after this long without an answer; what is missing is asked anew")
    receive_high_water: int = Field(50_000, ge=1, description="engine messages of one rank that may wait in this process")
    buffer_bytes: int = Field(
        64 << 20, ge=2 << 20, description="records held while the stream is away; then the oldest are dropped and a gap mark is written"
    )
    writer_buffer_bytes: int = Field(8 << 20, ge=2 << 20, description="of them, what may be under way to the stream")
    metrics_host: str = Field("127.0.0.1", description="address of /metrics, /healthz and /readyz; loopback unless told otherwise")
    metrics_port: int = Field(9464, ge=0, le=65535, description="their port; 0 takes a free one, which the log names")
    stop_timeout_s: float = Field(5.0, ge=0, description="how long what waits may take to reach the stream at the end")

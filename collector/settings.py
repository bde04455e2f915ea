"""Settings of `warmwatch collect`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from collector.analytics.cost import CostModel, CostRules, hardware_in
from collector.analytics.reuse import MAX_TRACKED, MIN_SHARE, TRACKED_BLOCKS
from schemas.fleet import load_fleet
from schemas.settings import Settings


class HardwareCosts(BaseModel):
    """What differs from the settings of the same names for one kind of worker."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prefill_base_s: float | None = Field(None, ge=0)
    prefill_a: float | None = Field(None, gt=0)
    prefill_b: float | None = Field(None, ge=0)
    gpus: float | None = Field(None, gt=0)
    price_per_gpu_hour: float | None = Field(None, ge=0)


class CollectorSettings(Settings):
    """Reads the stream and writes the published database."""

    command: ClassVar[str] = "collect"

    data_dir: Path = Field(Path("data"), description="folder of the published database, its segments and the collector's state")
    metrics_host: str = Field("127.0.0.1", description="address of /metrics, /healthz and /readyz; loopback unless told otherwise")
    metrics_port: int = Field(9465, ge=0, le=65535, description="port of /metrics, /healthz and /readyz; 0 takes a free one")
    partitions: int = Field(4, ge=1, le=4096, description="partitions of topics that do not exist yet")
    publish_interval_s: float = Field(1.0, gt=0, le=60, description="seconds between two published files")
    poll_records: int = Field(20_000, ge=1, le=1_000_000, description="most records taken from the stream at once")
    lateness_s: float = Field(1.0, ge=0, le=600, description="seconds that records of one moment may arrive apart")
    clock_tolerance_s: float = Field(0.05, ge=0, le=10, description="how far the clocks of routers and engines may differ")
    outcome_wait_s: float = Field(900.0, gt=0, description="seconds after which a decision without outcome is closed as outcome_missing")
    decision_wait_s: float = Field(
        15.0,
        gt=0,
        description="seconds after which an outcome without decision is closed as decision_missing, "
        "and a request whose worker's bridge is silent without a hit told from events",
    )
    stale_after_s: float = Field(10.0, gt=0, description="silence of a worker's bridge from which its trust is degraded at most")
    blind_after_s: float = Field(60.0, gt=0, description="the same, for blind")
    open_bytes: int = Field(
        512 << 20, ge=1 << 20, description="memory for requests in flight or not told yet, beyond which the oldest are closed as they are"
    )
    recent_events: int = Field(1 << 20, description="ring of recent KV events for attribution; a power of two, 56 bytes each")
    recent_hashes: int = Field(1 << 24, description="ring of their block hashes; a power of two, 12 bytes each")
    ghost_blocks: int = Field(
        2_500_000,
        ge=2,
        le=1 << 30,
        description="lost blocks whose loss is known exactly, by worker; 27 bytes each; older ones are in a filter",
    )
    seen_blocks: int = Field(
        2_500_000, ge=2, le=1 << 30, description="blocks known exactly as seen; 13 bytes each; older ones are in a filter"
    )
    filter_blocks: int = Field(
        20_000_000,
        ge=2,
        le=1 << 32,
        description="keys of each of two generations of the filters of lost and of seen blocks; 12 to 24 bits each in each filter; "
        "not less than ghost_blocks and seen_blocks. What came before is forgotten",
    )
    content_entries: int = Field(
        2_000_000, ge=1000, description="pieces of prompt text known as seen, to tell what diverged from what is new; about 40 bytes each"
    )
    reuse_blocks: int = Field(
        TRACKED_BLOCKS,
        ge=MIN_SHARE,
        le=MAX_TRACKED,
        description="blocks that reuse curves follow in each pool, and again among all its workers, 24 to 49 bytes each; exact to half of "
        "that, sampled beyond",
    )
    checkpoint_blocks: int = Field(4_000_000, ge=1, description="block events after which the cache state is saved anew")
    checkpoint_interval_s: float = Field(300.0, gt=0, description="seconds after which it is saved anew if anything changed")
    bucket_close_s: float = Field(30.0, ge=10, description="seconds after its end at which a 10 s bucket becomes a segment")
    kv_events_keep_s: float = Field(86_400.0, gt=0, description="age at which rows of kv_events are dropped")
    keep_s: float = Field(30 * 86_400.0, gt=0, description="age at which rows of all other tables are dropped")
    kv_events_keep_bytes: int = Field(8 << 30, ge=1 << 20, description="bytes of kv_events segments beyond which the oldest are dropped")
    keep_bytes: int = Field(32 << 30, ge=1 << 20, description="bytes of each other table beyond which its oldest segments are dropped")
    reader_grace_s: float = Field(60.0, ge=0, description="seconds for which files that no longer count are kept for open readers")
    fleet: Path | None = Field(
        None, description="fleet file of router and bridge, read for the workers' `hardware`; without it all workers are of one kind"
    )
    prefill_base_s: float | None = Field(None, ge=0, description="prefill cost where none is fitted: seconds of any prefill")
    prefill_a: float | None = Field(None, gt=0, description="the same: seconds an uncached token; default: not known")
    prefill_b: float | None = Field(None, ge=0, description="the same: seconds a pair of an uncached token and one before it (attention)")
    gpus: float | None = Field(
        None, gt=0, description="GPUs that one prefill occupies (tensor times pipeline parallel); default: not known"
    )
    price_per_gpu_hour: float | None = Field(None, ge=0, description="price of a GPU for an hour; default: losses have no price")
    currency: str | None = Field(None, min_length=1, max_length=20, description="of the prices, such as USD")
    hardware: dict[str, HardwareCosts] = Field(
        {},
        description="what differs for workers with this `hardware` label in the fleet file: prefill_base_s, prefill_a, prefill_b, gpus, "
        "price_per_gpu_hour; in a settings file [collect.hardware.h100]",
    )
    min_free_bytes: int = Field(512 << 20, ge=0, description="free disk space below which reading pauses")

    @field_validator("recent_events", "recent_hashes")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 1024 or value & (value - 1):
            raise ValueError(f"must be a power of two of at least 1024, such as {1 << max(10, value.bit_length())}")
        return value

    @model_validator(mode="after")
    def _filters_hold_what_is_exact(self) -> Self:
        for name in ("ghost_blocks", "seen_blocks"):
            if getattr(self, name) > self.filter_blocks:
                raise ValueError(f"setting `{name}`: more than filter_blocks ({self.filter_blocks}), which takes up what it cannot hold")
        return self

    @model_validator(mode="after")
    def _prices_have_a_currency(self) -> Self:
        if self.currency is None and any(
            price is not None for price in (self.price_per_gpu_hour, *(h.price_per_gpu_hour for h in self.hardware.values()))
        ):
            raise ValueError("setting `currency`: missing; price_per_gpu_hour needs one, such as USD")
        return self

    def cost_model(self) -> CostModel:
        """With what is configured of costs. Raises SettingsError when the fleet file is not what it should be."""
        kinds = {name: self._cost_rules(own) for name, own in self.hardware.items()}
        if self.fleet is None:
            return CostModel(self._cost_rules(HardwareCosts()), kinds)
        return CostModel(self._cost_rules(HardwareCosts()), kinds, hardware_in(load_fleet(self.fleet)))

    def _cost_rules(self, own: HardwareCosts) -> CostRules:
        def first(value: float | None, otherwise: float | None) -> float | None:
            return otherwise if value is None else value

        return CostRules(
            first(own.prefill_base_s, self.prefill_base_s), first(own.prefill_a, self.prefill_a), first(own.prefill_b, self.prefill_b),
            first(own.gpus, self.gpus), first(own.price_per_gpu_hour, self.price_per_gpu_hour), self.currency,
        )  # fmt: skip

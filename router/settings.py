"""Settings of `warmwatch route`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr, field_validator

from router.policy.cost import Coefficients
from router.policy.policies import POLICIES
from router.workers.breaker import BreakerRules
from router.workers.probes import ProbeRules
from router.workers.rules import WorkerRules
from schemas.settings import Settings


class RouterSettings(Settings):
    """Routes OpenAI requests to the workers that hold their prefix."""

    command: ClassVar[str] = "route"

    host: str = Field("127.0.0.1", description="address to listen on; loopback unless told otherwise")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    admin_port: int = Field(8081, ge=0, le=65535, description="loopback port of the admin endpoints; 0 takes a free one")
    fleet: Path = Field(Path("fleet.toml"), description="fleet file: pools and workers (form: schemas/fleet.py)")
    router_name: str = Field("router", min_length=1, max_length=200, description="name of this replica in decisions")
    policy: str = Field("cost", description=f"who takes a request: {', '.join(POLICIES)}")
    seed: int | None = Field(None, description="seed of tie breaking, for runs that must repeat; default: drawn")

    alpha: float = Field(Coefficients().alpha, ge=0, description="weight of waiting against computing")
    beta: float = Field(Coefficients().beta, ge=0, description="how much each decoding request makes a prefill dearer")
    prefill_a: float = Field(Coefficients().a, gt=0, description="prefill seconds a token")
    prefill_b: float = Field(Coefficients().b, ge=0, description="prefill seconds a token squared (attention)")
    decode_c: float = Field(Coefficients().c, ge=0, description="seconds an output token for each request decoding beside it")
    expected_output_tokens: float = Field(Coefficients().expected_output_tokens, ge=0, description="output tokens expected of a request")
    lower_tier_weight: float = Field(Coefficients().lower_tier_weight, ge=0, le=1, description="worth of a block below the GPU, 0 to 1")
    degraded_weight: float = Field(Coefficients().degraded_weight, ge=0, le=1, description="worth of overlap on a degraded worker, 0 to 1")
    expect_ttl_s: float = Field(
        2.0, ge=0, description="seconds beyond the predicted first token for which a dispatch counts as expected blocks"
    )

    stale_after_s: float = Field(
        10.0, gt=0, description="silence of a worker's bridge, or lag of the index behind the stream, from which it counts as degraded"
    )
    blind_after_s: float = Field(60.0, gt=0, description="the same, as blind")
    warm_up_s: float = Field(30.0, ge=0, description="seconds for which /readyz waits at most until the index has caught up")

    api_keys_file: Path | None = Field(
        None, description="TOML file of the API keys that may send requests (form: router/access/keys.py); default: nobody is asked for one"
    )
    open_metrics: bool = Field(False, description="/metrics needs no API key either (the admin port's never does)")
    upstream_api_key: SecretStr | None = Field(None, description="the engines' own API key, sent to workers instead of the client's")
    upstream_api_key_file: Path | None = Field(None, description="file that holds the engines' own API key")
    forward_credentials: bool | None = Field(
        None, description="send the client's Authorization and x-api-key on to the workers; default: only while there is no api_keys_file"
    )
    tls_cert_file: Path | None = Field(
        None, description="PEM file with the certificate and its chain: HTTPS; read again when it changes; default: plain HTTP"
    )
    tls_key_file: Path | None = Field(None, description="PEM file with the certificate's private key, without a passphrase")

    include_usage: bool = Field(
        False, description="ask for usage in streams that did not ask; their clients then see one more chunk, with the usage"
    )
    choose_rank: bool = Field(True, description="with several data-parallel ranks (vLLM), choose the rank by X-data-parallel-rank")
    max_body_bytes: int = Field(32 << 20, ge=1024, description="largest request body")
    connect_timeout_s: float = Field(2.0, gt=0, description="for the connection to a worker")
    read_timeout_s: float = Field(600.0, gt=0, description="longest silence of a worker while it answers")
    max_prompt_chars: int = Field(
        4_000_000, ge=0, description="longer prompts (characters after the chat template) are not tokenized but routed by load; 0: no limit"
    )
    max_waiting_prompts: int = Field(
        256, ge=0, description="long prompts that may wait for a tokenizer thread; more are not tokenized but routed by load"
    )
    tokenize_timeout_s: float = Field(2.0, gt=0, description="for the engine's /tokenize")
    attempts: int = Field(3, ge=1, le=64, description="workers tried before a request is given up")
    retry_ratio: float = Field(0.2, ge=0, le=1, description="retries that each request adds to a pool's budget")
    retry_burst: float = Field(100.0, ge=0, description="retries that a pool's budget holds at most, and at the start; 0: no retries")
    retry_statuses: list[int] = Field(
        [502, 503],
        description="statuses of a worker that send a request on to the next worker while nothing was passed on; the last one's answer is "
        "passed on in any case. 503 says that nothing was computed; 500 and 504 may have cost a whole prefill",
    )
    health_path: str = Field("/health", pattern=r"^/\S*$", description="path of the workers' health check; 2xx to 4xx is well")
    health_every_s: float = Field(5.0, ge=0, description="how often a worker that is well is asked; 0: only those that are not")
    health_timeout_s: float = Field(3.0, gt=0, description="for a health check; a silent one is forgiven while requests are answered")
    unhealthy_after: int = Field(3, ge=1, description="failed health checks in a row until a worker gets nothing more")
    probe_every_s: float = Field(1.0, gt=0, description="how often a worker that is down is asked for its health")
    breaker_open_s: float = Field(1.0, gt=0, description="how long a worker that failed gets nothing at first; doubled each time")
    breaker_longest_open_s: float = Field(30.0, gt=0, description="the longest of these times")
    max_in_flight: int = Field(
        0,
        ge=0,
        description="requests at one worker (or rank) at once; further ones wait in the router; 0: no limit, engines queue themselves",
    )
    max_queue: int = Field(1024, ge=0, description="requests of a pool that may wait in the router; more are told 429 and Retry-After")
    max_queue_wait_s: float = Field(30.0, gt=0, description="how long a request may wait in the router; then the same")
    watch_fleet_s: float = Field(
        5.0,
        ge=0,
        description="how often the fleet file and the pools' `discover` are looked at for workers that come or go; 0: on SIGHUP only",
    )
    worker_drain_s: float = Field(600.0, ge=0, description="after so long a draining worker is taken out though it is not empty")
    drain_delay_s: float = Field(
        0.0, ge=0, description="how long after SIGTERM /readyz says 503 before connections are refused, for a load balancer to see it"
    )
    drain_s: float = Field(30.0, ge=0, description="how long requests may take to end after that")
    record_buffer: int = Field(
        20_000, ge=1, description="decisions and outcomes held while the stream is away; more are dropped and counted"
    )

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"must be one of {', '.join(POLICIES)}")
        return value

    @field_validator("retry_statuses")
    @classmethod
    def _only_failures(cls, value: list[int]) -> list[int]:
        if any(not 500 <= status <= 599 for status in value):
            raise ValueError("must be statuses from 500 to 599: a 4xx is an answer to the client")
        return value

    def worker_rules(self) -> WorkerRules:
        return WorkerRules(
            breaker=BreakerRules(
                open_s=self.breaker_open_s, longest_open_s=self.breaker_longest_open_s, unhealthy_after=self.unhealthy_after
            ),
            probes=ProbeRules(self.health_path, self.health_every_s, self.probe_every_s, self.health_timeout_s),
            retry_ratio=self.retry_ratio, retry_burst=self.retry_burst, retry_statuses=frozenset(self.retry_statuses),
            max_in_flight=self.max_in_flight, max_queue=self.max_queue, max_queue_wait_s=self.max_queue_wait_s,
            worker_drain_s=self.worker_drain_s,
        )  # fmt: skip

    def coefficients(self) -> Coefficients:
        return Coefficients(
            alpha=self.alpha, beta=self.beta, a=self.prefill_a, b=self.prefill_b, c=self.decode_c,
            expected_output_tokens=self.expected_output_tokens,
            lower_tier_weight=self.lower_tier_weight, degraded_weight=self.degraded_weight,
        )  # fmt: skip

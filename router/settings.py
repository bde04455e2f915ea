"""Settings of `warmwatch route`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from router.index.table import DEFAULT_LIMIT_BYTES
from router.policy.book import CoefficientBook
from router.policy.cost import Coefficients, Rates
from router.policy.policies import POLICIES, policies_help
from router.policy.rules import PolicyRules
from router.policy.shadows import MOST_SHADOWS
from router.replicas.addresses import checked_address
from router.workers.breaker import BreakerRules
from router.workers.probes import ProbeRules
from router.workers.rules import WorkerRules
from schemas.fleet import TokensBy
from schemas.settings import Settings


class HardwareRates(BaseModel):
    """What differs from the settings of the same names for one kind of hardware."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prefill_base_s: float | None = Field(None, ge=0)
    prefill_a: float | None = Field(None, gt=0)
    prefill_b: float | None = Field(None, ge=0)
    decode_c0: float | None = Field(None, ge=0)
    decode_c: float | None = Field(None, ge=0)
    load_cpu_s_per_token: float | None = Field(None, ge=0)
    load_disk_s_per_token: float | None = Field(None, ge=0)


class RouterSettings(Settings):
    """Routes OpenAI requests to the workers that hold their prefix."""

    command: ClassVar[str] = "route"

    host: str = Field("127.0.0.1", description="address to listen on; loopback unless told otherwise")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    admin_port: int = Field(8081, ge=0, le=65535, description="loopback port of the admin endpoints; 0 takes a free one")
    fleet: Path = Field(Path("fleet.toml"), description="fleet file: pools and workers (form: schemas/fleet.py)")
    router_name: str = Field("router", min_length=1, max_length=200, description="name of this replica in decisions")
    policy: str = Field("cost", description=f"who takes a request. {policies_help()}")
    shadow_policies: list[str] = Field(
        [], max_length=MOST_SHADOWS, description="policies that choose beside it without effect, recorded and counted; names as in `policy`"
    )
    seed: int | None = Field(None, description="seed of tie breaking, for runs that must repeat; default: drawn")

    alpha: float = Field(Coefficients().alpha, ge=0, description="weight of waiting against computing")
    beta: float = Field(Coefficients().beta, ge=0, description="how much each decoding request makes a prefill dearer")
    prefill_base_s: float = Field(Rates().base_s, ge=0, description="seconds that each prefill takes besides its tokens")
    prefill_a: float = Field(Rates().a, gt=0, description="prefill seconds a token")
    prefill_b: float = Field(Rates().b, ge=0, description="prefill seconds a pair of a token and one before it (attention)")
    decode_c0: float = Field(Rates().c0, ge=0, description="seconds an output token; matters where hardware differs")
    decode_c: float = Field(Rates().c1, ge=0, description="seconds an output token for each request decoding beside it")
    load_cpu_s_per_token: float = Field(Rates().load_cpu_s_per_token, ge=0, description="seconds to load a token's KV from CPU memory")
    load_disk_s_per_token: float = Field(Rates().load_disk_s_per_token, ge=0, description="the same, from disk or a remote store")
    hardware: dict[str, HardwareRates] = Field(
        {},
        description="what differs for workers with this `hardware` label in the fleet file: prefill_base_s, prefill_a, prefill_b, "
        "decode_c0, decode_c, load_cpu_s_per_token, load_disk_s_per_token; in a settings file [route.hardware.h100]",
    )
    adopt_fits: bool = Field(
        False, description="choose by prefill coefficients fitted from outcomes; else they are only shown (admin port)"
    )
    fits_file: Path | None = Field(None, description="JSON file that keeps fitted coefficients over restarts; default: they are forgotten")
    fit_every_s: float = Field(30.0, gt=0, description="how often the router looks whether outcomes give better coefficients")
    expected_output_tokens: float = Field(Coefficients().expected_output_tokens, ge=0, description="output tokens expected of a request")
    degraded_weight: float = Field(Coefficients().degraded_weight, ge=0, le=1, description="worth of overlap on a degraded worker, 0 to 1")
    expect_ttl_s: float = Field(
        2.0, ge=0, description="seconds beyond the predicted first token for which a dispatch counts as expected blocks"
    )
    drain_min_hit: float = Field(
        PolicyRules().drain_min_hit, ge=0, le=1, description="share of a prompt that a draining worker must hold to be given it"
    )
    cold_tokens_per_s: float = Field(
        PolicyRules().cold_tokens_per_s,
        ge=0,
        description="uncached prompt tokens a second that a worker is given when it is new; 0: no cap",
    )
    cold_s: float = Field(
        PolicyRules().cold_s, ge=0, description="seconds for which a worker is new, at most until it holds half as much as the others"
    )
    engine_load_fresh_s: float = Field(
        PolicyRules().engine_load_fresh_s, ge=0, description="how long an engine's own load counts, for what others send there; 0: never"
    )

    stale_after_s: float = Field(
        10.0, gt=0, description="silence of a worker's bridge, or lag of the index behind the stream, from which it counts as degraded"
    )
    blind_after_s: float = Field(60.0, gt=0, description="the same, as blind")
    approximate_max_bytes: int = Field(
        64 << 20, ge=1 << 20, description="memory for what prompts known by their text alone were sent where"
    )
    approximate_decay_s: float = Field(
        600.0, gt=0, description="for how long such a prompt counts as held by the worker that it was sent to"
    )
    index_max_bytes: int = Field(
        DEFAULT_LIMIT_BYTES,
        ge=1 << 20,
        description="memory for what workers hold, some 27 bytes a block; what has no room is not known, and its worker degraded",
    )
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
    first_byte_timeout_s: float = Field(
        600.0, gt=0, description="for the first byte of an answer's body: queue and prefill, or the whole of an answer that does not stream"
    )
    idle_timeout_s: float = Field(300.0, gt=0, description="longest silence of a worker within an answer")
    upstream_ca_file: Path | None = Field(
        None, description="PEM file of the authorities that https workers are checked with; default: the system's"
    )
    upstream_verify: bool = Field(True, description="check the certificates of https workers; only a closed network can do without")
    client_timeout_s: float = Field(
        60.0, gt=0, description="for a client to send its whole request, and longest time for which it takes nothing of its answer"
    )
    max_head_bytes: int = Field(64 << 10, ge=1024, description="largest request line and headers together; more is told 431")
    max_headers: int = Field(128, ge=8, description="most headers of a request; more is told 431")
    response_headers: list[Literal["worker", "predicted-cached-tokens", "request-id", "token-source"]] = Field(
        ["worker", "predicted-cached-tokens", "request-id"], description="which x-warmwatch-* headers answers carry; []: none"
    )
    max_prompt_chars: int = Field(
        4_000_000, ge=0, description="longer prompts (characters after the chat template) are not tokenized but routed by load; 0: no limit"
    )
    max_waiting_prompts: int = Field(
        256, ge=0, description="long prompts that may wait for a tokenizer thread; more are not tokenized but routed by load"
    )
    tokens: TokensBy = Field(
        "auto",
        description="how prompts become token ids, unless the fleet file's pool says: exact (its tokenizer), engine (the workers' "
        "/tokenize), text (pieces of text, approximate index); auto: exact with a tokenizer, else engine. What cannot be read so goes "
        "by its text",
    )
    known_chats_mb: int = Field(
        64, ge=1, description="megabytes of conversations kept for each pool with a tokenizer, so that only their new messages are read"
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
        description="this router's requests at one worker (or rank) at once; further ones wait; 0: no limit, engines queue themselves",
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
    replica_listen: str | None = Field(
        None, description="ZeroMQ address on which this router tells its replicas of its requests: tcp://10.0.0.7:5570; default: none"
    )
    replica_peers: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="addresses of the other replicas with commas between, or one whose name leads to all of them: tcp://routers:5570"
    )
    replica_secret_file: Path | None = Field(
        None, description="file with 64 hexadecimal digits (openssl rand -hex 32), the same for all replicas: what they tell is encrypted"
    )
    templates: dict[str, Annotated[str, Field(min_length=1, max_length=1024)]] = Field(
        {},
        description="prompt template of requests that name none (x-warmwatch-template), by route; in a settings file [route.templates]",
    )
    record_content: bool = Field(
        True,
        description="decisions describe what of a prompt no worker holds by keyed hashes of its content, so that a changed beginning is "
        "told from new text; some 1.3 bytes a new token",
    )
    record_snippets: bool = Field(
        False,
        description="decisions carry the first 200 characters of each prompt's text, for people who look at hotspots. It is written to the "
        "stream and to the published database in the clear: leave it off where prompts are private",
    )
    record_buffer: int = Field(
        20_000, ge=1, description="decisions and outcomes held while the stream is away; more are dropped and counted"
    )

    @field_validator("policy", "shadow_policies")
    @classmethod
    def _known(cls, value: str | list[str]) -> str | list[str]:
        if any(name not in POLICIES for name in ([value] if isinstance(value, str) else value)):
            raise ValueError(f"must be one of {', '.join(POLICIES)}" if isinstance(value, str) else f"must be of {', '.join(POLICIES)}")
        if isinstance(value, list) and len(set(value)) != len(value):
            raise ValueError("names a policy twice")
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

    def rates(self, hardware: HardwareRates | None = None) -> Rates:
        """Of hardware with these differences."""
        own = hardware or HardwareRates()
        return Rates(
            base_s=_first(own.prefill_base_s, self.prefill_base_s), a=_first(own.prefill_a, self.prefill_a),
            b=_first(own.prefill_b, self.prefill_b), c0=_first(own.decode_c0, self.decode_c0), c1=_first(own.decode_c, self.decode_c),
            load_cpu_s_per_token=_first(own.load_cpu_s_per_token, self.load_cpu_s_per_token),
            load_disk_s_per_token=_first(own.load_disk_s_per_token, self.load_disk_s_per_token),
        )  # fmt: skip

    @field_validator("replica_listen")
    @classmethod
    def _listens(cls, value: str | None) -> str | None:
        return None if value is None else checked_address(value, listens=True)

    @field_validator("replica_peers", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(filter(None, (part.strip() for part in value.split(",")))) if isinstance(value, str) else value

    @field_validator("replica_peers")
    @classmethod
    def _connects(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(checked_address(v) for v in value)

    def coefficients(self) -> Coefficients:
        return Coefficients(
            alpha=self.alpha, beta=self.beta, expected_output_tokens=self.expected_output_tokens,
            degraded_weight=self.degraded_weight, rates=self.rates(),
        )  # fmt: skip

    def policy_rules(self) -> PolicyRules:
        return PolicyRules(self.drain_min_hit, self.cold_tokens_per_s, self.cold_s, self.engine_load_fresh_s, tuple(self.shadow_policies))

    def coefficient_book(self) -> CoefficientBook:
        """Reads `fits_file`. Raises SettingsError when it is not what it should be."""
        return CoefficientBook(
            self.rates(), {name: self.rates(own) for name, own in self.hardware.items()}, self.adopt_fits, self.fits_file
        )


def _first(own: float | None, otherwise: float) -> float:
    return otherwise if own is None else own

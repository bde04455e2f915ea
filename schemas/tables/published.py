"""The published database: the contract for the dashboard, for ad hoc SQL and for alerts. Every table and column says what it means.

The collector writes these tables, as views over Parquet segments where they grow; readers open `warmwatch.duckdb` read-only and reopen it
to see what is new (the collector replaces the file whole, about once a second). Times are UTC. NULL means "not known" or "not reported",
never zero. A new column or table raises MINOR, a changed meaning raises MAJOR.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import resources

from schemas.causes import ACTOR, AVOIDABLE, MEANING, Cause
from schemas.tables.losses import LOSS_COLUMNS, LOSS_TABLES
from schemas.tables.table import WHO, Table, quote, table

MAJOR, MINOR = 1, 2

BUCKET_S = 10

# Latency histograms: bucket b holds values in [LATENCY_FLOOR_S * GROWTH^b, LATENCY_FLOOR_S * GROWTH^(b+1)); 2 % wide, so a percentile read
# at the bucket's geometric middle is within 1 %. Values below the floor (0.1 ms) fall into bucket 0.
LATENCY_FLOOR_S = 1e-4
LATENCY_GROWTH = 1.02


def latency_bucket(value_s: float) -> int:
    """The bucket of a latency in seconds."""
    return max(0, math.floor(math.log(max(value_s, LATENCY_FLOOR_S) / LATENCY_FLOOR_S) / math.log(LATENCY_GROWTH) + 1e-9))


def latency_middle_s(bucket: int) -> float:
    """The value that stands for a bucket: its geometric middle, seconds."""
    return float(LATENCY_FLOOR_S * LATENCY_GROWTH ** (bucket + 0.5))


REQUESTS = table(
    "requests",
    "One row a request: the router's decision joined with its outcome. Requests in flight have NULL ended_at, status and error.",
    ("request_id", "VARCHAR", "Unique id of the request, as sent in X-Request-Id or made by the router."),
    ("session_id", "VARCHAR", "The client's session, if it named one."),
    ("started_at", "TIMESTAMP", "Dispatch to the worker; for an outcome without decision the end minus e2e_s."),
    ("ended_at", "TIMESTAMP", "End of the answer; NULL: in flight, or the outcome never came (outcome_missing)."),
    ("router", "VARCHAR", "Router replica that decided, or found nobody to send it to; NULL: no record said."),
    *WHO,
    ("model", "VARCHAR", "Model name that the client asked for."),
    ("path", "VARCHAR", "HTTP path."),
    ("route", "VARCHAR", "The caller's name for this kind of traffic."),
    ("tenant", "VARCHAR", "Tenant, from the API key or a header."),
    ("template", "VARCHAR", "The prompt template that the caller named (header, or the router's configuration); NULL: none."),
    ("stream", "BOOLEAN", "The client asked for a stream."),
    ("policy", "VARCHAR", "Routing policy that chose the worker."),
    ("policy_version", "VARCHAR", "Version of that policy."),
    ("coefficients_version", "VARCHAR", "Version of the cost model's coefficients; NULL: not said."),
    ("token_source", "VARCHAR", "How the router knew the prompt: exact (own tokenizer), engine (/tokenize), text (approximated), none."),
    ("token_reason", "VARCHAR", "Why the source is text or none, or nothing is forecast; NULL: not said."),
    ("prompt_tokens", "UINTEGER", "Prompt tokens as the engine reported; where it did not, as the router counted."),
    ("cached_tokens", "UINTEGER", "Prompt tokens found in the cache, as the engine reported; NULL: not reported."),
    (
        "event_hit_tokens",
        "UINTEGER",
        "The same told from KV events: longest resident prefix just before the request's own first store. NULL: the events do not suffice.",
    ),
    (
        "predicted_tokens",
        "UINTEGER",
        "What the router expected to be cached on the chosen worker: confirmed plus speculative overlap, at most the whole blocks before "
        "the last token. With token_source text a guess; NULL: no forecast, as with an unknown prefix.",
    ),
    (
        "best_overlap_tokens",
        "UINTEGER",
        "Longest prefix that any worker of the pool held at dispatch, as the router saw; with token_source text a guess. NULL: not known.",
    ),
    ("best_overlap_worker", "VARCHAR", "The worker that held it, whether it could be chosen or not."),
    ("best_overlap_rank", "USMALLINT", "Its rank."),
    ("created_tokens", "UINTEGER", "Prompt tokens newly entered in the cache, as the engine reported."),
    ("completion_tokens", "UINTEGER", "Generated tokens, as the engine reported."),
    ("block_size", "UINTEGER", "Tokens a KV block."),
    ("chain_blocks", "UINTEGER", "Full blocks of the prompt; NULL: their names are unknown."),
    ("chain_head", "UBIGINT", "Canonical hash of the first full block."),
    ("chain_tail", "UBIGINT", "Canonical hash of the last full block; it names the whole prefix."),
    ("ttft_s", "DOUBLE", "Dispatch to first content byte, seconds, seen by the router; NULL for answers that do not stream."),
    ("e2e_s", "DOUBLE", "Dispatch to the end of the answer, seconds."),
    ("engine_queue_s", "DOUBLE", "Wait inside the engine, seconds, if it reports that."),
    ("engine_ttft_s", "DOUBLE", "Time to first token inside the engine, seconds, if it reports that."),
    ("queue_s", "DOUBLE", "The policy's predicted wait on the chosen worker, seconds."),
    ("prefill_s", "DOUBLE", "The policy's predicted prefill there, seconds."),
    ("load_s", "DOUBLE", "The policy's predicted loading of blocks from lower tiers there, seconds."),
    ("decode_s", "DOUBLE", "The policy's predicted cost of running beside the decodes there, seconds."),
    ("cost_s", "DOUBLE", "The policy's cost of the chosen worker, seconds."),
    ("runner_up_worker", "VARCHAR", "The cheapest other worker that could have been chosen; NULL: there was none, or not said."),
    ("runner_up_rank", "USMALLINT", "Its rank."),
    ("margin_s", "DOUBLE", "Cost of the runner-up minus cost of the chosen, seconds."),
    ("waited_s", "DOUBLE", "Wait in the router's own queue before the decision, seconds."),
    ("index_lag_s", "DOUBLE", "Age of the newest KV batch of the chosen worker that the router had applied, seconds."),
    (
        "index_behind_s",
        "DOUBLE",
        "How far the router's index was behind the stream, seconds: all events that are older were applied. NULL: not known.",
    ),
    ("epoch", "UBIGINT", "Epoch of the chosen worker's cache in the router's index."),
    ("seq", "UBIGINT", "Engine sequence that the router's index had applied."),
    ("trust", "VARCHAR", "Trust of the router's index of the chosen worker: exact, degraded, blind."),
    ("workers_considered", "UINTEGER", "Workers that could have been chosen; NULL: not said."),
    ("status", "USMALLINT", "HTTP status sent to the client; NULL: in flight, or the client left first."),
    ("error", "VARCHAR", "Why it failed: timeout, connect, disconnect, upstream and so on; NULL: it did not."),
    ("retries", "UTINYINT", "How often it was sent again, to another worker; NULL: not reported."),
    ("decide_us", "DOUBLE", "Time the routing decision took, microseconds, tokenizing left out."),
    ("tokenize_us", "DOUBLE", "Time tokenizing took, microseconds."),
    ("request_bytes", "UBIGINT", "Body of the request, bytes."),
    ("response_bytes", "UBIGINT", "Body of the answer, bytes."),
    (
        "decision_missing",
        "BOOLEAN",
        "An outcome came, but no decision within the waiting time. False for requests that no worker could be chosen for: worker is NULL.",
    ),
    ("outcome_missing", "BOOLEAN", "A decision came, but no outcome within the waiting time."),
    *LOSS_COLUMNS,
)

CANDIDATES = table(
    "candidates",
    "The workers that a decision compared: the chosen one and the best others. A request that was sent again to another worker has the "
    "rows of each of its decisions, told apart by started_at; the newest are those that hold, as in requests.",
    ("request_id", "VARCHAR", "The request; see requests."),
    ("started_at", "TIMESTAMP", "Dispatch of the request."),
    ("position", "USMALLINT", "Order in the record: the chosen worker, then the others by cost, those that could not be chosen last."),
    ("chosen", "BOOLEAN", "The request went to this worker."),
    *WHO,
    (
        "overlap_tokens",
        "UINTEGER",
        "Longest contiguous prefix held there, confirmed by KV events, any tier; with token_source text a guess. NULL: not known.",
    ),
    ("overlap_gpu_tokens", "UINTEGER", "Of these, on the GPU; NULL: not told apart."),
    ("overlap_cpu_tokens", "UINTEGER", "Of these, in CPU memory; NULL: not told apart."),
    ("overlap_disk_tokens", "UINTEGER", "Of these, on disk; NULL: not told apart."),
    ("speculative_tokens", "UINTEGER", "Further tokens expected from requests dispatched but not yet confirmed."),
    ("queue_s", "DOUBLE", "Predicted wait before this request's prefill, seconds."),
    ("prefill_s", "DOUBLE", "Predicted prefill of the uncached tokens, seconds."),
    ("load_s", "DOUBLE", "Predicted loading of blocks from lower tiers, seconds."),
    ("decode_s", "DOUBLE", "Predicted cost of running beside the decodes there, seconds."),
    ("cost_s", "DOUBLE", "What the policy minimised, seconds; NULL: the policy has no cost."),
    ("coefficients_version", "VARCHAR", "Version of the coefficients that these seconds were made with; NULL: not said."),
    ("epoch", "UBIGINT", "Epoch of the worker's cache in the router's index."),
    ("seq", "UBIGINT", "Engine sequence that the router's index had applied."),
    ("trust", "VARCHAR", "Trust of the router's index of this worker."),
    ("in_flight", "UINTEGER", "Requests in flight there, of all routers as far as this one knew; NULL: not said."),
    ("decoding", "UINTEGER", "Of these, past their first token."),
    ("draining", "BOOLEAN", "It was being emptied and took no new request."),
    ("allowed", "BOOLEAN", "False: it could not be chosen: down, draining, or tried before. NULL: not said."),
)

SHADOWS = table(
    "shadows",
    "What other policies would have done with each request: one row a decision and shadow policy. How often they would have chosen "
    "otherwise: avg((NOT same)::INT) by policy; what that would have saved: sum(predicted_tokens) against sum(chosen_predicted_tokens). "
    "Decisions of one request that was sent again are told apart by started_at, as in candidates.",
    ("request_id", "VARCHAR", "The request; see requests."),
    ("started_at", "TIMESTAMP", "Dispatch of the request."),
    ("policy", "VARCHAR", "The policy that was only asked, not followed."),
    ("policy_version", "VARCHAR", "Its version; NULL: not said."),
    ("chosen_policy", "VARCHAR", "The policy that decided in earnest."),
    *WHO,
    ("same", "BOOLEAN", "It would have sent the request where it went."),
    ("predicted_tokens", "UINTEGER", "Cached tokens to be expected at its pick; NULL: the prefix is unknown."),
    ("chosen_predicted_tokens", "UINTEGER", "The same at the worker that the request went to; NULL where predicted_tokens is."),
    ("margin_s", "DOUBLE", "Cost of its pick minus cost of the chosen by the cost model, seconds; negative: it looked cheaper."),
)

ATTEMPTS = table(
    "attempts",
    "Dispatches that gave no answer, or one of retry_statuses, and were tried again elsewhere. The last one of a request that failed for "
    "good is not here but in requests: worker and error.",
    ("request_id", "VARCHAR", "The request; see requests."),
    ("started_at", "TIMESTAMP", "Dispatch of the decision that told of it: to the next worker."),
    ("position", "USMALLINT", "0 is the first."),
    *WHO,
    ("error", "VARCHAR", "What happened."),
    ("after_s", "DOUBLE", "How long after its dispatch, seconds."),
)

KV_EVENTS = table(
    "kv_events",
    "One row an event of a worker's cache. unnest(hashes) gives blocks.",
    ("happened_at", "TIMESTAMP", "Engine time of the event; where the engine gives none, the bridge's."),
    ("bridge_at", "TIMESTAMP", "When the bridge packed it."),
    *WHO,
    ("epoch", "UBIGINT", "Incarnation of the worker's cache."),
    ("seq", "UBIGINT", "Engine batch; for a gap the first batch lost."),
    ("kind", "VARCHAR", "stored, removed, cleared, epoch_started, gap, snapshot, reported, unnamed; see schemas/kv_events.py."),
    ("tier", "VARCHAR", "GPU, CPU, DISK or EXTERNAL."),
    ("group_idx", "USMALLINT", "KV-cache group of a hybrid model; 0 otherwise."),
    ("block_size", "UINTEGER", "Tokens a block; 0: not known."),
    ("flags", "UINTEGER", "Bits: 1 complete, 2 first, 4 last, 8 windowed, 16 the engine restarted."),
    ("parent", "UBIGINT", "Canonical hash before the first block (stored), last batch lost (gap), number of blocks (unnamed)."),
    ("blocks", "UINTEGER", "Number of hashes."),
    ("hashes", "UBIGINT[]", "Canonical block hashes in prefix order."),
    ("stream_partition", "USMALLINT", "Partition of the kv-events topic."),
    ("stream_offset", "UBIGINT", "Offset of the record there."),
)

WORKER_10S = table(
    "worker_10s",
    "Counts and gauges a worker and 10 seconds. Requests count in the bucket in which they ended.",
    ("bucket", "TIMESTAMP", "Start of the 10 seconds."),
    *WHO,
    ("requests", "UBIGINT", "Requests that ended."),
    ("failed", "UBIGINT", "Of these, with an error or a status of 400 and more."),
    ("prompt_tokens", "UBIGINT", "Prompt tokens of requests that ended."),
    ("completion_tokens", "UBIGINT", "Generated tokens, where reported."),
    ("reported_requests", "UBIGINT", "Requests whose engine reported cached tokens: the denominator of request-weighted hit rates."),
    ("reported_prompt_tokens", "UBIGINT", "Their prompt tokens: the denominator of token-weighted hit rates."),
    ("cached_tokens", "UBIGINT", "Their cached tokens: the numerator."),
    (
        "hit_share_sum",
        "DOUBLE",
        "Sum of cached_tokens / prompt_tokens over reported requests: divided by reported_requests, the request-weighted hit rate.",
    ),
    ("event_requests", "UBIGINT", "Requests whose hit could be told from events."),
    ("event_prompt_tokens", "UBIGINT", "Their prompt tokens."),
    ("event_hit_tokens", "UBIGINT", "Their hits as told from events."),
    ("event_mismatches", "UBIGINT", "Requests for which events and engine report disagree."),
    ("predicted_requests", "UBIGINT", "Requests with both a prediction and a report."),
    ("predicted_exact", "UBIGINT", "Of these, predicted tokens equal to cached tokens."),
    ("stored_blocks", "UBIGINT", "Blocks stored."),
    ("removed_blocks", "UBIGINT", "Blocks removed (evicted)."),
    ("clears", "UBIGINT", "Clears of the whole cache and new epochs."),
    ("lost_batches", "UBIGINT", "Engine batches lost for good."),
    ("resident_blocks", "UBIGINT", "Physical blocks held at the end of the bucket, from events; NULL: no event yet."),
    ("running", "DOUBLE", "Mean requests running, from the engine's metrics page."),
    ("waiting", "DOUBLE", "Mean requests waiting."),
    ("kv_usage", "DOUBLE", "Mean share of blocks held by requests, 0 to 1."),
    ("engine_query_tokens", "DOUBLE", "Growth of the engine's own prefix cache query counter."),
    ("engine_hit_tokens", "DOUBLE", "Growth of the engine's own prefix cache hit counter."),
    ("preemptions", "DOUBLE", "Growth of the engine's preemption counter."),
)

LATENCY_10S = table(
    "latency_10s",
    "Latency histograms in log buckets 2 % wide; merge by adding n. Bucket b starts at 0.1 ms * 1.02^b.",
    ("bucket", "TIMESTAMP", "Start of the 10 seconds in which the requests ended."),
    *WHO,
    ("route", "VARCHAR", "The caller's name for this kind of traffic."),
    ("policy", "VARCHAR", "Routing policy."),
    ("measure", "VARCHAR", "ttft, e2e, engine_queue, engine_ttft."),
    ("log_bucket", "USMALLINT", "Log bucket."),
    ("n", "UBIGINT", "Requests."),
)

WORKERS = table(
    "workers",
    "Each worker and rank as last seen.",
    *WHO,
    ("engine", "VARCHAR", "vllm, sglang or other."),
    ("model", "VARCHAR", "Model that it serves."),
    ("up", "BOOLEAN", "Its metrics page answered at the last reading; NULL: never read."),
    (
        "trust",
        "VARCHAR",
        "exact: every event since the epoch's start was seen; degraded: a gap or an incomplete start; blind: nothing known.",
    ),
    ("trust_reason", "VARCHAR", "Why the trust is not exact."),
    ("epoch", "UBIGINT", "Current incarnation of its cache."),
    ("seq", "UBIGINT", "Newest engine batch applied."),
    ("epoch_started_at", "TIMESTAMP", "When this incarnation was first seen."),
    ("last_event_at", "TIMESTAMP", "Newest event."),
    ("last_load_at", "TIMESTAMP", "Newest metrics reading."),
    ("resident_blocks", "UBIGINT", "Physical blocks held, from events."),
    ("peak_resident_blocks", "UBIGINT", "Most blocks held at once in this epoch."),
    ("distinct_blocks", "UBIGINT", "Distinct contents among them."),
    ("capacity_blocks", "UBIGINT", "Usable blocks, from the engine."),
    ("block_size", "UINTEGER", "Tokens a block."),
    ("running", "DOUBLE", "Requests running."),
    ("waiting", "DOUBLE", "Requests waiting."),
    ("kv_usage", "DOUBLE", "Share of blocks held by requests, 0 to 1."),
    ("restarts", "UBIGINT", "Restarts of the engine that its bridge saw: its sequence began anew. A restart of the bridge alone is none."),
)

CHANGES = table(
    "changes",
    "Deploys, configuration, scaling and notes, as marked by people and tools, and what the collector saw itself (restarts, gaps).",
    ("happened_at", "TIMESTAMP", "When it happened."),
    ("kind", "VARCHAR", "deploy, config, scale, incident, policy, note, restart, gap, clear."),
    ("text", "VARCHAR", "What happened."),
    ("author", "VARCHAR", "Who marked it; NULL: not said; 'collector': seen in the events."),
    ("pool", "VARCHAR", "Pool concerned; NULL: the whole fleet."),
    ("worker", "VARCHAR", "Worker concerned; NULL: all."),
)

DATA_HEALTH = table(
    "data_health",
    "What can be said about the data itself now: one row a check.",
    ("area", "VARCHAR", "stream, bridge, collector, join."),
    ("subject", "VARCHAR", "Topic/partition, pool/worker/rank or the like; empty: the whole."),
    ("name", "VARCHAR", "What is measured, such as lag_records or lost_batches."),
    ("value", "DOUBLE", "The value; NULL: not known."),
    ("unit", "VARCHAR", "records, s, blocks, bytes ..."),
    ("status", "VARCHAR", "ok, warn, bad, unknown."),
    ("detail", "VARCHAR", "In a sentence: what it means and what to do."),
    ("measured_at", "TIMESTAMP", "When it was measured."),
)

DEAD_LETTERS = table(
    "dead_letters",
    "Records that could not be used, with the reason; nothing else was lost with them.",
    ("set_aside_at", "TIMESTAMP", "When the collector set it aside."),
    ("topic", "VARCHAR", "Topic."),
    ("stream_partition", "USMALLINT", "Partition."),
    ("stream_offset", "UBIGINT", "Offset."),
    ("key", "VARCHAR", "Record key as text; bytes that are no UTF-8 are escaped."),
    ("reason", "VARCHAR", "The rule that the record breaks."),
    ("size_bytes", "UBIGINT", "Length of the value."),
    ("value", "BLOB", "The value, whole."),
)

PUBLISHED = table(
    "published",
    "One row about this file itself.",
    ("published_at", "TIMESTAMP", "When the collector published this file."),
    ("watermark", "TIMESTAMP", "Everything that happened before is in here, but for late records; NULL: nothing received yet."),
    ("version", "VARCHAR", "Version of these tables, major.minor."),
    ("collector", "VARCHAR", "Version of the collector."),
    ("has_events", "BOOLEAN", "KV events were received."),
    ("has_decisions", "BOOLEAN", "Router decisions were received."),
    ("has_outcomes", "BOOLEAN", "Outcomes were received."),
    ("has_load", "BOOLEAN", "Worker load was received."),
    ("state", "VARCHAR", "running, paused (with the reason in data_health) or stopped."),
)

TABLES: tuple[Table, ...] = (
    REQUESTS, CANDIDATES, SHADOWS, ATTEMPTS, KV_EVENTS, WORKER_10S, LATENCY_10S, WORKERS, CHANGES, DATA_HEALTH, DEAD_LETTERS,
    PUBLISHED, *LOSS_TABLES,
)  # fmt: skip


def macros_sql() -> str:
    """CREATE MACRO statements of the frequent questions; they refer to the tables above."""
    return _CAUSE_MACROS + resources.files(__package__).joinpath("macros.sql").read_text()


def _of_causes(name: str, says: str, texts: Mapping[Cause, str]) -> str:
    cases = " ".join(f"WHEN {quote(c.label)} THEN {text}" for c, text in texts.items())
    return f"CREATE MACRO {name}(cause) AS (CASE cause {cases} END);\nCOMMENT ON MACRO {name} IS {quote(says)};\n"


_CAUSE_MACROS = (
    _of_causes("cause_meaning", "cause_meaning(cause): what a cause means, in a sentence.", {c: quote(text) for c, text in MEANING.items()})
    + _of_causes("cause_actor", "cause_actor(cause): who can act on it; NULL for hit.", {c: quote(text) for c, text in ACTOR.items()})
    + _of_causes(
        "cause_avoidable",
        "cause_avoidable(cause): somebody can do something about it without paying for it elsewhere.",
        {c: str(c in AVOIDABLE).lower() for c in Cause},
    )
)

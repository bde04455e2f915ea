"""Tables of why tokens were computed again, and of what the prefixes, caches and prompts behind that look like.

Windows are 300 s long and start at multiples of it; the open one is in the tables, too. Rows of one window and key may be several (late
requests open a further one): add numbers up, as the macros do.
"""

from __future__ import annotations

from schemas.causes import LOSSES, MEANING
from schemas.tables.table import WHO, Table, table

_TOKENS = tuple((f"{c.label}_tokens", "UINTEGER", f"Prompt tokens computed, since: {MEANING[c]}.") for c in LOSSES)

LOSS_COLUMNS: tuple[tuple[str, str, str], ...] = (
    (
        "hit_tokens",
        "UINTEGER",
        "Prompt tokens that the cache delivered: as the engine reported, else told from events. hit_tokens and the columns *_tokens of the "
        "causes that follow add up to prompt_tokens. NULL here and there: not attributed (in flight, refused, or failed before a prefill); "
        "NULL only here: neither reported nor told, and all tokens are in unexplained_tokens.",
    ),
    *_TOKENS,
    (
        "ideal_tokens",
        "UINTEGER",
        "Loss ladder: longest prefix that any worker held before the dispatch; what endless caches would hit.",
    ),
    ("held_tokens", "UINTEGER", "Loss ladder: longest prefix held by any one worker of the pool at the dispatch, from events."),
    ("held_worker", "VARCHAR", "The worker that held it; the chosen one if it held as much."),
    (
        "selected_tokens",
        "UINTEGER",
        "Loss ladder: prefix that the chosen worker held at the clock of the router's index. The last is hit_tokens.",
    ),
    ("first_miss_token", "UINTEGER", "Tokens before the first one that was computed."),
    ("first_miss_cause", "VARCHAR", "Its cause."),
    (
        "causes",
        "STRUCT(cause VARCHAR, tokens UINTEGER)[]",
        "The prompt as runs of one cause each, from its first token on; 'hit' is none. Lengths add up to prompt_tokens.",
    ),
    (
        "diverged_at_token",
        "UINTEGER",
        "Tokens shared with earlier prompts before the first that differs; NULL: it did not, or not known.",
    ),
    (
        "regret_tokens",
        "UINTEGER",
        "Tokens computed that another worker held at the dispatch: causes misrouted and load_bypass. NULL: not attributed.",
    ),
    (
        "regret_s",
        "DOUBLE",
        "Cost of the chosen worker minus that of the best holder of more, by the router's cost model, seconds. Positive: misrouted; "
        "negative: seconds that the load bypass bought. NULL: nobody held more, or costs were not told.",
    ),
    ("lost_s", "DOUBLE", "Prefill seconds that all causes cost, by the fitted cost model; NULL: nothing fitted and nothing configured."),
    ("avoidable_s", "DOUBLE", "Of these, of causes that somebody can act on without paying elsewhere: see schemas/causes.py."),
    ("loss_trust", "VARCHAR", "Trust of the events that this was told from, at that moment; NULL: there were none."),
    (
        "unexplained_reason",
        "VARCHAR",
        "Why unexplained_tokens is not 0: gap, engine_reports_less, preempted, not_reported, no_names ...",
    ),
)

LOSS_10S = table(
    "loss_10s",
    "Prompt tokens by cause in 10 seconds, worker and kind of traffic: why tokens were computed again. Requests count in the bucket in "
    "which they ended. sum(tokens) over all causes, 'hit' included, is prompt_tokens of the attributed requests.",
    ("bucket", "TIMESTAMP", "Start of the 10 seconds."),
    *WHO,
    ("model", "VARCHAR", "Model name that clients asked for."),
    ("route", "VARCHAR", "The caller's name for this kind of traffic."),
    ("tenant", "VARCHAR", "Tenant."),
    ("cause", "VARCHAR", f"hit, or one of {', '.join(c.label for c in LOSSES)}."),
    ("tokens", "UBIGINT", "Prompt tokens."),
    ("requests", "UBIGINT", "Requests with at least one such token."),
    ("lost_s", "DOUBLE", "Prefill seconds that they cost by the cost model; NULL: not known. 0 for hits."),
    ("seconds_known_tokens", "UBIGINT", "Tokens for which lost_s is known: the denominator when some are not."),
)

LADDER_10S = table(
    "ladder_10s",
    "The loss ladder in 10 seconds, worker and kind of traffic: prompt, ideal, held anywhere, selected, delivered. Of attributed requests "
    "whose events were complete.",
    ("bucket", "TIMESTAMP", "Start of the 10 seconds in which the requests ended."),
    *WHO,
    ("model", "VARCHAR", "Model name that clients asked for."),
    ("route", "VARCHAR", "The caller's name for this kind of traffic."),
    ("tenant", "VARCHAR", "Tenant."),
    ("policy", "VARCHAR", "Routing policy."),
    ("requests", "UBIGINT", "Requests."),
    ("prompt_tokens", "UBIGINT", "Their prompt tokens."),
    ("ideal_tokens", "UBIGINT", "Of these, in prefixes that any worker ever held before."),
    ("held_tokens", "UBIGINT", "Of these, held by one worker at the dispatch."),
    ("selected_tokens", "UBIGINT", "Of these, held by the chosen worker at the clock of the router's index."),
    ("hit_tokens", "UBIGINT", "Of these, delivered."),
    ("regret_tokens", "UBIGINT", "Tokens computed that another worker held."),
    ("misrouted_s", "DOUBLE", "Seconds lost by misrouting, by the router's cost model."),
    ("bypass_bought_s", "DOUBLE", "Seconds bought by load bypasses."),
)

PREFIXES = table(
    "prefixes",
    "Recomputation hotspots: prefixes that most tokens computed again have in common, a window each; hierarchical heavy hitters over the "
    "prefix tree. Tokens that nobody can act on (first_seen, granularity) are left out. A request counts at the deepest hotspot on its "
    "chain, so rows of one window add up, to at most what was lost; what prompts of one kind lost that share no hotspot is the row "
    "of prefix 0.",
    ("window_start", "TIMESTAMP", "Start of the window."),
    ("window_s", "UINTEGER", "Length of the window, seconds."),
    ("pool", "VARCHAR", "Pool."),
    (
        "prefix",
        "UBIGINT",
        "Canonical hash of the prefix's last block; it names the whole prefix. 0: prompts of this model, route, tenant and template that "
        "have no heavy prefix in common, as when they differ from their first block on.",
    ),
    ("parent_prefix", "UBIGINT", "The nearest hotspot above it in the window; NULL: none."),
    ("depth_tokens", "UINTEGER", "Length of the prefix, tokens; 0 for prefix 0."),
    ("model", "VARCHAR", "Model of most of its tokens."),
    ("route", "VARCHAR", "Route of most of its tokens."),
    ("tenant", "VARCHAR", "Tenant of most of its tokens."),
    ("template", "VARCHAR", "Template of most of its tokens; NULL: none was named."),
    ("snippet", "VARCHAR", "Beginning of its text; NULL unless an operator switched snippets on in the router."),
    (
        "lost_tokens",
        "UBIGINT",
        "Tokens computed again by prompts that begin with it, without those that count at hotspots below it, and without first_seen and "
        "granularity.",
    ),
    ("total_tokens", "UBIGINT", "The same, hotspots below it included; for prefix 0 equal to lost_tokens."),
    (
        "error_tokens",
        "UBIGINT",
        "By how much total_tokens can be too low; 0: exact. lost_tokens likewise, and too high by at most the errors of the hotspots next "
        "below. For prefix 0 in both directions.",
    ),
    ("requests", "UBIGINT", "Requests that lost tokens there."),
    ("avoidable_tokens", "UBIGINT", "Of lost_tokens, of causes that somebody can act on."),
    ("top_cause", "VARCHAR", "Cause of most of them."),
    ("by_cause", "STRUCT(cause VARCHAR, tokens UBIGINT)[]", "lost_tokens by cause, most first."),
    ("lost_s", "DOUBLE", "Prefill seconds that they cost, of those whose seconds are known; NULL: of none."),
    ("workers", "UINTEGER", "Workers that computed it in the window; at most 64 are told apart."),
    ("copies", "UINTEGER", "Workers that hold the whole prefix now (at the end of the window); NULL: not looked up."),
    (
        "gone_p50_s",
        "DOUBLE",
        "Median age of the loss when it was needed again, seconds, of evicted and cleared blocks, within 19 %; NULL: none.",
    ),
    ("idle_p50_s", "DOUBLE", "Median idle time before eviction, seconds, within 19 %; NULL: none."),
    ("example_request_id", "VARCHAR", "A request that lost tokens there, the newest."),
)

REUSE_CURVES = table(
    "reuse_curves",
    "What hit rate a cache of another size or lifetime would have had, from stack distances of the window's requests over all that came "
    "before. A curve of one worker holds for today's routing only. Prompts are all that counts: blocks that decoding filled are new to the "
    "curve when the next prompt has them, and so engines can hit a little more than even an endless cache here.",
    ("window_start", "TIMESTAMP", "Start of the window."),
    ("window_s", "UINTEGER", "Length of the window, seconds."),
    ("pool", "VARCHAR", "Pool."),
    ("worker", "VARCHAR", "Worker; NULL: the whole pool as one cache."),
    (
        "kind",
        "VARCHAR",
        "capacity: LRU of that many blocks; ttl: blocks forgotten so long after their last use; ideal: a cache without end.",
    ),
    ("scale", "DOUBLE", "Of today's capacity, 0.25 to 16; NULL: a size of the grid for drawing, or no size at all (ttl, ideal)."),
    (
        "tier",
        "VARCHAR",
        "With scale: GPU for sizes of the GPU's cache alone, 'GPU+CPU' and so on for today's sizes with lower tiers, as large as the "
        "largest of them, for lower tiers hold copies. NULL without.",
    ),
    ("capacity_blocks", "UBIGINT", "Size of that cache, blocks; of a worker with several ranks: of all of them. NULL for ttl and ideal."),
    ("ttl_s", "DOUBLE", "Lifetime, seconds; NULL for capacity and ideal."),
    ("hit_tokens", "DOUBLE", "Prompt tokens that it would have hit."),
    ("prompt_tokens", "UBIGINT", "Prompt tokens of the requests: the denominator."),
    ("hit_blocks", "DOUBLE", "The same in full blocks."),
    ("prompt_blocks", "UBIGINT", "Full blocks of the requests."),
    (
        "method",
        "VARCHAR",
        "exact; sampled: beyond the memory budget, from a sample of older blocks; rounded: too many different distances in the window.",
    ),
    (
        "error",
        "DOUBLE",
        "Error of hit_blocks / prompt_blocks: 0 exact, a bound if rounded, two standard errors if sampled. Errors of several windows may "
        "point the same way: average them, do not expect them to cancel.",
    ),
)

DIVERGENCE = table(
    "divergence",
    "Where prompts of one kind stop being alike: prompts whose content was seen, but after another beginning. One row a window, kind of "
    "traffic and depth; a kind of which no request diverged has one, too, with depth NULL and requests 0, for shares of all. "
    "all_requests and all_prompt_tokens are the same in all rows of a window and kind: take one of them. What comes after the first 1,024 "
    "kinds of a window is counted together, with pool, model, route and tenant NULL.",
    ("window_start", "TIMESTAMP", "Start of the window."),
    ("window_s", "UINTEGER", "Length of the window, seconds."),
    ("pool", "VARCHAR", "Pool."),
    ("model", "VARCHAR", "Model."),
    ("route", "VARCHAR", "Route."),
    ("tenant", "VARCHAR", "Tenant."),
    ("template", "VARCHAR", "Template; NULL: none was named."),
    (
        "depth_from",
        "UINTEGER",
        "The prompts differ at or after this token (they share so many) ... NULL: not known. One token where all differ there, else a bin.",
    ),
    ("depth_to", "UINTEGER", "... and before this one."),
    ("requests", "UBIGINT", "Requests that diverged there."),
    ("diverged_tokens", "UBIGINT", "Their tokens computed again though the content was known."),
    ("all_requests", "UBIGINT", "All requests of that kind in the window, diverged or not."),
    ("all_prompt_tokens", "UBIGINT", "Their prompt tokens: the denominator of the share to alarm on."),
    ("lost_s", "DOUBLE", "Prefill seconds that it cost; NULL: not known."),
    ("example_request_id", "VARCHAR", "A request that diverged there, the newest."),
)

PRESSURE = table(
    "pressure",
    "How full the caches are for what they are asked: one row a window, pool and worker (worker NULL: the whole pool).",
    ("window_start", "TIMESTAMP", "Start of the window."),
    ("window_s", "UINTEGER", "Length of the window, seconds."),
    ("pool", "VARCHAR", "Pool."),
    ("worker", "VARCHAR", "Worker; NULL: the pool."),
    ("capacity_blocks", "UBIGINT", "Usable blocks, from the engine; NULL: not known."),
    ("working_set_blocks", "UBIGINT", "Distinct full blocks of the window's prompts."),
    ("active_sessions", "UBIGINT", "Sessions with a request in the window; NULL: no session is named."),
    (
        "active_blocks",
        "UBIGINT",
        "Distinct blocks of these sessions' newest prompts: what must be held to serve their next turns, if all go on. Sessions that "
        "ended in the window are in it: an upper bound.",
    ),
    (
        "pressure",
        "DOUBLE",
        "active_blocks / capacity_blocks; above 1 no policy can keep what all these sessions would need next. NULL: one is not known.",
    ),
    ("resident_blocks", "UBIGINT", "Blocks held at the end of the window, copies counted, from events; NULL: no events."),
    ("distinct_blocks", "UBIGINT", "Distinct contents among them."),
    ("duplication", "DOUBLE", "resident_blocks / distinct_blocks."),
    ("duplicate_tokens", "UBIGINT", "Tokens' worth of cache that second and further copies take."),
    (
        "lifetime_p50_s",
        "DOUBLE",
        "Median time from store to removal, seconds, of a sample of the blocks removed in the window; NULL: none.",
    ),
    ("lifetime_p90_s", "DOUBLE", "The same, 90th percentile."),
    ("idle_p50_s", "DOUBLE", "Median time from last use to removal, seconds, of that sample."),
    ("idle_p90_s", "DOUBLE", "The same, 90th percentile."),
    ("removed_sample", "UBIGINT", "Blocks in that sample."),
    ("return_p50_s", "DOUBLE", "Median time from removal to being needed again, seconds, of blocks computed again; NULL: none."),
    ("return_p90_s", "DOUBLE", "The same, 90th percentile."),
    ("returned_blocks", "UBIGINT", "Blocks computed again after a loss."),
    ("growth_p50_tokens", "DOUBLE", "Median growth of a session's prompt from one request to the next, tokens; NULL: no session went on."),
    ("growth_p90_tokens", "DOUBLE", "The same, 90th percentile."),
)

COST_MODELS = table(
    "cost_models",
    "The fitted prefill cost of each model and kind of worker: seconds = base + a*u + b*u*(cached + u/2) of u uncached tokens.",
    ("pool", "VARCHAR", "Pool."),
    ("model", "VARCHAR", "Model."),
    ("hardware", "VARCHAR", "Kind of worker, from the fleet file; 'default' where none is named."),
    ("version", "VARCHAR", "Changes with the coefficients."),
    ("source", "VARCHAR", "fitted, configured, or fitted from TTFT where the engine reports no times."),
    ("base_s", "DOUBLE", "Seconds of any prefill."),
    ("a_s_per_token", "DOUBLE", "Seconds an uncached token."),
    ("b_s_per_token2", "DOUBLE", "Seconds a pair of an uncached token and one before it."),
    ("observations", "UBIGINT", "Requests that it was fitted from."),
    ("residual_s", "DOUBLE", "Typical distance of an observation (median absolute), seconds."),
    ("gpus", "DOUBLE", "GPUs of one worker, from configuration."),
    ("price_per_gpu_hour", "DOUBLE", "Price, from configuration; NULL: none is set."),
    ("currency", "VARCHAR", "Of the price."),
    ("fitted_at", "TIMESTAMP", "Newest observation."),
)

LOSS_TABLES: tuple[Table, ...] = (LOSS_10S, LADDER_10S, PREFIXES, REUSE_CURVES, DIVERGENCE, PRESSURE, COST_MODELS)

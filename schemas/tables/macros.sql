-- What share of prompt tokens was found in the cache between two times (UTC)? NULL: nothing was reported.
CREATE MACRO hit_rate(since, until) AS (
  SELECT sum(cached_tokens) / nullif(sum(reported_prompt_tokens), 0)
  FROM worker_10s WHERE bucket >= since AND bucket < until
);
COMMENT ON MACRO hit_rate IS 'hit_rate(since, until): token-weighted share of prompt tokens found in the cache, from engine reports; UTC.';

-- Which TTFT in seconds was not exceeded by the share q of a worker's requests between two times? worker NULL: all. Within 1 %.
CREATE MACRO ttft(worker_name, q, since, until) AS (
  SELECT min(1e-4 * pow(1.02, log_bucket + 0.5)) FROM (
    SELECT log_bucket, sum(sum(n)) OVER (ORDER BY log_bucket) AS upto, sum(sum(n)) OVER () AS total
    FROM latency_10s
    WHERE measure = 'ttft' AND bucket >= since AND bucket < until AND (worker_name IS NULL OR worker = worker_name)
    GROUP BY log_bucket
  ) WHERE upto >= q * total
);
COMMENT ON MACRO ttft IS 'ttft(worker, q, since, until): TTFT percentile in seconds, merged from log-bucket histograms, within 1 %; worker NULL: all.';

-- Why was each token of one request computed again? One row a run of one cause, from the first token on.
CREATE MACRO why(request) AS TABLE
  WITH runs AS (
    SELECT request_id, started_at, prompt_tokens, unexplained_reason, position, causes[position].cause AS cause,
      causes[position].tokens AS tokens
    FROM (SELECT *, unnest(range(1, len(causes) + 1)) AS position FROM requests WHERE request_id = request)
    UNION ALL
    SELECT request_id, started_at, prompt_tokens, unexplained_reason, 1, NULL, NULL
    FROM requests WHERE request_id = request AND coalesce(len(causes), 0) = 0
  )
  SELECT request_id, started_at, position,
    CASE WHEN tokens IS NOT NULL
      THEN (sum(tokens) OVER (PARTITION BY request_id, started_at ORDER BY position) - tokens)::UINTEGER END AS from_token,
    cause, tokens, tokens / nullif(prompt_tokens, 0) AS share,
    CASE WHEN cause IS NULL THEN 'not attributed: in flight, refused, or failed before a prefill'
      WHEN cause = 'unexplained' THEN concat_ws('; ', cause_meaning(cause), 'reason: ' || unexplained_reason)
      ELSE cause_meaning(cause) END AS meaning,
    cause_actor(cause) AS who_can_act
  FROM runs ORDER BY started_at, position;
COMMENT ON MACRO TABLE why IS 'why(request_id): its prompt as runs of one cause each, from the first token on: tokens, share of the prompt, what the cause means, who can act. Two requests of one id are told apart by started_at.';

-- How many GPUs does a worker of each pool have, and what does one cost an hour? Where kinds of workers differ, their mean.
CREATE MACRO gpu_prices() AS TABLE
  SELECT pool, avg(gpus) AS gpus, CASE WHEN min(currency) = max(currency) OR max(currency) IS NULL THEN avg(price_per_gpu_hour) END AS price,
    min(currency) AS currency
  FROM cost_models GROUP BY pool;
COMMENT ON MACRO TABLE gpu_prices IS 'gpu_prices(): GPUs of a worker and price of a GPU hour by pool, from configuration; means where kinds of workers differ; NULL price: none is set, or currencies differ.';

-- Which causes made the fleet compute prompt tokens between two times (UTC), and what did that cost? 'hit' is a row, too: shares add up to 1.
CREATE MACRO loss(since, until, in_pool := NULL) AS TABLE
  WITH counted AS (
    SELECT l.cause, sum(l.tokens)::UBIGINT AS tokens, sum(l.requests)::UBIGINT AS requests, sum(l.lost_s) AS lost_s,
      sum(l.seconds_known_tokens)::UBIGINT AS seconds_known_tokens,
      CASE WHEN bool_and(l.lost_s IS NULL OR p.gpus IS NOT NULL) THEN sum(l.lost_s * p.gpus) END AS gpu_s,
      CASE WHEN bool_and(l.lost_s IS NULL OR p.gpus * p.price IS NOT NULL) AND coalesce(min(p.currency) = max(p.currency), true)
        THEN sum(l.lost_s * p.gpus * p.price) / 3600 END AS money,
      min(p.currency) AS currency
    FROM loss_10s l LEFT JOIN gpu_prices() p ON p.pool = l.pool
    WHERE l.bucket >= since AND l.bucket < until AND (in_pool IS NULL OR l.pool = in_pool)
    GROUP BY l.cause
  )
  SELECT cause, tokens, tokens / nullif(sum(tokens) OVER (), 0) AS share, requests, lost_s, seconds_known_tokens, gpu_s, money,
    CASE WHEN money IS NOT NULL THEN currency END AS currency, cause_avoidable(cause) AS avoidable, cause_actor(cause) AS who_can_act,
    cause_meaning(cause) AS meaning
  FROM counted ORDER BY cause = 'hit' DESC, tokens DESC, cause;
COMMENT ON MACRO TABLE loss IS 'loss(since, until, in_pool := NULL): prompt tokens by cause, hits first: share of all, requests (one with several causes counts at each), prefill seconds, GPU-seconds and money where known and configured, who can act; UTC.';

-- How far did prompts get on the way from "somebody computed this once" to "the worker found it", between two times (UTC)?
CREATE MACRO ladder(since, until, in_pool := NULL) AS TABLE
  WITH counted AS (
    SELECT sum(requests)::UBIGINT AS requests, sum(prompt_tokens)::UBIGINT AS prompt, sum(ideal_tokens)::UBIGINT AS ideal,
      sum(held_tokens)::UBIGINT AS held, sum(selected_tokens)::UBIGINT AS selected, sum(hit_tokens)::UBIGINT AS hit
    FROM ladder_10s WHERE bucket >= since AND bucket < until AND (in_pool IS NULL OR pool = in_pool)
  ), steps AS (
    SELECT requests, prompt, unnest([
      {'position': 1, 'step': 'prompt', 'tokens': prompt, 'before': NULL, 'meaning': 'prompt tokens of requests whose events were complete'},
      {'position': 2, 'step': 'ideal', 'tokens': ideal, 'before': prompt, 'meaning': 'computed before by any worker: what endless caches would hit'},
      {'position': 3, 'step': 'held', 'tokens': held, 'before': ideal, 'meaning': 'still held by one worker at the dispatch'},
      {'position': 4, 'step': 'selected', 'tokens': selected, 'before': held, 'meaning': 'held by the worker that was chosen, as the router saw it'},
      {'position': 5, 'step': 'delivered', 'tokens': hit, 'before': selected, 'meaning': 'found in its cache'}
    ]) AS s FROM counted
  )
  SELECT s.position AS position, s.step AS step, s.tokens AS tokens, s.tokens / nullif(prompt, 0) AS share,
    (s.before::BIGINT - s.tokens::BIGINT) AS lost_here, requests, s.meaning AS meaning
  FROM steps ORDER BY position;
COMMENT ON MACRO TABLE ladder IS 'ladder(since, until, in_pool := NULL): the loss ladder: prompt, ideal, held, selected, delivered: tokens, share of the prompts, and what each step lost; NULL tokens: no request was told; UTC.';

-- Which prefixes were computed again most between two times (UTC)? Windows that touch the time are added up.
CREATE MACRO hotspots(since, until, in_pool := NULL) AS TABLE
  WITH rows_of AS (
    SELECT *, CASE WHEN prefix = 0 THEN {'model': model, 'route': route, 'tenant': tenant, 'template': template} END AS kind
    FROM prefixes
    WHERE window_start + window_s * INTERVAL 1 SECOND > since AND window_start < until AND (in_pool IS NULL OR pool = in_pool)
  ), by_part AS (
    SELECT pool, prefix, kind, part.cause AS cause, sum(part.tokens)::UBIGINT AS tokens
    FROM rows_of, unnest(by_cause) AS u(part) GROUP BY ALL
  ), parts AS (
    SELECT pool, prefix, kind, list({'cause': cause, 'tokens': tokens} ORDER BY tokens DESC, cause) AS by_cause
    FROM by_part GROUP BY ALL
  ), merged AS (
    SELECT pool, prefix, kind, max(depth_tokens) AS depth_tokens, arg_max(model, lost_tokens) AS model, arg_max(route, lost_tokens) AS route,
      arg_max(tenant, lost_tokens) AS tenant, arg_max(template, lost_tokens) AS template, max(snippet) AS snippet,
      sum(lost_tokens)::UBIGINT AS lost_tokens, sum(total_tokens)::UBIGINT AS total_tokens, sum(error_tokens)::UBIGINT AS error_tokens,
      sum(requests)::UBIGINT AS requests, sum(avoidable_tokens)::UBIGINT AS avoidable_tokens, sum(lost_s) AS lost_s,
      max(workers) AS workers, arg_max_null(copies, window_start) AS copies, arg_max(gone_p50_s, lost_tokens) AS gone_p50_s,
      arg_max(idle_p50_s, lost_tokens) AS idle_p50_s, arg_max(example_request_id, window_start) AS example_request_id,
      count(DISTINCT window_start) AS windows, min(window_start) AS first_window, max(window_start) AS last_window
    FROM rows_of GROUP BY ALL
  )
  SELECT m.pool, m.prefix, m.depth_tokens, m.model, m.route, m.tenant, m.template, m.snippet, m.lost_tokens, m.total_tokens, m.error_tokens,
    m.requests, m.avoidable_tokens, p.by_cause[1].cause AS top_cause, p.by_cause, m.lost_s, m.lost_s * g.gpus AS gpu_s, m.lost_s * g.gpus * g.price / 3600 AS money,
    CASE WHEN m.lost_s * g.gpus * g.price IS NOT NULL THEN g.currency END AS currency, m.workers, m.copies, m.gone_p50_s, m.idle_p50_s,
    m.example_request_id, m.windows, m.first_window, m.last_window
  FROM merged m LEFT JOIN parts p
    ON p.prefix = m.prefix AND p.pool IS NOT DISTINCT FROM m.pool AND p.kind IS NOT DISTINCT FROM m.kind
    LEFT JOIN gpu_prices() g ON g.pool = m.pool
  ORDER BY m.lost_tokens DESC, m.prefix;
COMMENT ON MACRO TABLE hotspots IS 'hotspots(since, until, in_pool := NULL): prefixes computed again, windows that touch the time added up, most tokens first, without tokens of first_seen and granularity; labels, ages from the window with most tokens, copies from the newest, workers the most of one window; prefix 0: see table prefixes; UTC.';

-- Where do prompts of one kind stop being alike, and what does that cost, between two times (UTC)?
CREATE MACRO divergence_of(since, until, in_pool := NULL) AS TABLE
  WITH at_depth AS (
    SELECT window_start, pool, model, route, tenant, template, depth_from, depth_to, sum(requests) AS requests,
      sum(diverged_tokens) AS diverged_tokens, sum(lost_s) AS lost_s, sum(all_requests) AS all_requests,
      sum(all_prompt_tokens) AS all_prompt_tokens, arg_max(example_request_id, requests) AS example_request_id
    FROM divergence
    WHERE window_start + window_s * INTERVAL 1 SECOND > since AND window_start < until AND (in_pool IS NULL OR pool = in_pool)
    GROUP BY ALL
  ), kinds AS (
    SELECT pool, model, route, tenant, template, sum(all_requests) AS all_requests, sum(all_prompt_tokens) AS all_prompt_tokens
    FROM (
      SELECT window_start, pool, model, route, tenant, template, max(all_requests) AS all_requests, max(all_prompt_tokens) AS all_prompt_tokens
      FROM at_depth GROUP BY ALL
    ) GROUP BY ALL
  ), depths AS (
    SELECT pool, model, route, tenant, template, depth_from, depth_to, sum(requests) AS requests, sum(diverged_tokens) AS diverged_tokens,
      sum(lost_s) AS lost_s, arg_max(example_request_id, window_start) AS example_request_id
    FROM at_depth GROUP BY ALL
  )
  SELECT d.pool, d.model, d.route, d.tenant, d.template, sum(d.requests)::UBIGINT AS requests, k.all_requests::UBIGINT AS all_requests,
    arg_max_null(d.depth_from, d.diverged_tokens) AS depth_from, arg_max_null(d.depth_to, d.diverged_tokens) AS depth_to,
    max(d.diverged_tokens) / nullif(sum(d.diverged_tokens), 0) AS depth_share, sum(d.diverged_tokens)::UBIGINT AS diverged_tokens,
    k.all_prompt_tokens::UBIGINT AS all_prompt_tokens, sum(d.diverged_tokens) / nullif(k.all_prompt_tokens, 0) AS share,
    sum(d.lost_s) AS lost_s, arg_max(d.example_request_id, d.diverged_tokens) AS example_request_id
  FROM depths d JOIN kinds k ON d.pool IS NOT DISTINCT FROM k.pool AND d.model IS NOT DISTINCT FROM k.model
    AND d.route IS NOT DISTINCT FROM k.route AND d.tenant IS NOT DISTINCT FROM k.tenant AND d.template IS NOT DISTINCT FROM k.template
  GROUP BY d.pool, d.model, d.route, d.tenant, d.template, k.all_requests, k.all_prompt_tokens
  HAVING sum(d.requests) > 0
  ORDER BY diverged_tokens DESC, d.pool, d.route;
COMMENT ON MACRO TABLE divergence_of IS 'divergence_of(since, until, in_pool := NULL): kinds of prompts that stop being alike: at which depth most of it happens (depth_share of the diverged tokens), tokens, and their share of all prompt tokens of the kind; UTC.';

-- How much of the time to first token was prefill of tokens that the cache could have held, between two times (UTC)?
CREATE MACRO ttft_loss(since, until, in_pool := NULL) AS TABLE
  SELECT pool, count(*) AS requests, sum(ttft_s) AS ttft_s, sum(least(lost_s, ttft_s)) AS lost_s,
    sum(least(lost_s, ttft_s)) / sum(ttft_s) AS lost_share, sum(least(avoidable_s, ttft_s)) / sum(ttft_s) AS avoidable_share,
    quantile_cont(least(lost_s / ttft_s, 1), 0.5) AS lost_share_p50, quantile_cont(least(avoidable_s / ttft_s, 1), 0.5) AS avoidable_share_p50
  FROM requests
  WHERE started_at >= since AND started_at < until AND (in_pool IS NULL OR pool = in_pool) AND ttft_s > 0 AND lost_s IS NOT NULL
  GROUP BY pool ORDER BY pool;
COMMENT ON MACRO TABLE ttft_loss IS 'ttft_loss(since, until, in_pool := NULL): share of the time to first token that prefill of misses explains, by pool: of all misses, of those that somebody can act on, together and of the median request; of requests whose TTFT and cost are known. What is over is queueing, the base of a prefill, its network and its neighbours; UTC.';

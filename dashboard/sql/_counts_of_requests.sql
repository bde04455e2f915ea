-- The building block `counts` told from single requests, since worker_10s knows neither model nor route. What only workers know is NULL.
SELECT time_bucket(INTERVAL '10 seconds', ended_at) AS bucket, pool, worker, rank,
  count(*) AS requests,
  count(*) FILTER (error IS NOT NULL OR status >= 400) AS failed,
  sum(prompt_tokens) AS prompt_tokens,
  sum(completion_tokens) AS completion_tokens,
  count(*) FILTER (cached_tokens IS NOT NULL AND prompt_tokens IS NOT NULL) AS reported_requests,
  sum(prompt_tokens) FILTER (cached_tokens IS NOT NULL) AS reported_prompt_tokens,
  sum(cached_tokens) FILTER (prompt_tokens IS NOT NULL) AS cached_tokens,
  sum(cached_tokens / nullif(prompt_tokens, 0)) AS hit_share_sum,
  count(*) FILTER (event_hit_tokens IS NOT NULL) AS event_requests,
  sum(prompt_tokens) FILTER (event_hit_tokens IS NOT NULL) AS event_prompt_tokens,
  sum(event_hit_tokens) AS event_hit_tokens,
  count(*) FILTER (event_hit_tokens <> cached_tokens) AS event_mismatches,
  count(*) FILTER (predicted_tokens IS NOT NULL AND cached_tokens IS NOT NULL AND token_source IN ('exact', 'engine')) AS predicted_requests,
  count(*) FILTER (predicted_tokens = cached_tokens AND token_source IN ('exact', 'engine')) AS predicted_exact,
  NULL::UBIGINT AS stored_blocks, NULL::UBIGINT AS removed_blocks, NULL::UBIGINT AS clears, NULL::UBIGINT AS lost_batches,
  NULL::UBIGINT AS resident_blocks, NULL::DOUBLE AS running, NULL::DOUBLE AS waiting, NULL::DOUBLE AS kv_usage,
  NULL::DOUBLE AS engine_query_tokens, NULL::DOUBLE AS engine_hit_tokens, NULL::DOUBLE AS preemptions
FROM requests
WHERE ended_at >= $since AND ended_at < $until AND ($pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker = $worker)
  AND ($route IS NULL OR route = $route) AND ($model IS NULL OR model = $model)
GROUP BY ALL

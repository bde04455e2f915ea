-- Do the router's prediction, the KV events, the engine's answers and the engine's counters agree, worker by worker?
-- parameters: since, until, pool, worker
-- grain: one row a worker and rank
SELECT pool, worker, rank,
  sum(predicted_requests) AS predicted_requests,
  sum(predicted_exact) AS predicted_exact,
  sum(predicted_exact) / nullif(sum(predicted_requests), 0) AS predicted_exact_share,
  sum(event_requests) AS event_requests,
  sum(event_mismatches) AS event_mismatches,
  sum(event_hit_tokens) / nullif(sum(event_prompt_tokens), 0) AS event_hit_rate,
  sum(cached_tokens) / nullif(sum(reported_prompt_tokens), 0) AS hit_rate,
  sum(engine_hit_tokens) / nullif(sum(engine_query_tokens), 0) AS engine_hit_rate,
  sum(engine_query_tokens) AS engine_query_tokens,
  sum(reported_prompt_tokens) AS reported_prompt_tokens
FROM worker_10s
WHERE bucket >= $since AND bucket < $until AND ($pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker = $worker)
GROUP BY ALL ORDER BY pool, worker, rank

-- Which worker had which hit rate when?
-- parameters: since, until, bin_s, pool, worker, and model and route when set
-- grain: one row a worker, rank and bin that has requests
SELECT pool, worker, rank, time_bucket(to_seconds($bin_s), bucket, $since::TIMESTAMP) AS bin_at,
  sum(cached_tokens) / nullif(sum(reported_prompt_tokens), 0) AS hit_rate,
  sum(engine_hit_tokens) / nullif(sum(engine_query_tokens), 0) AS engine_hit_rate,
  sum(engine_query_tokens) AS engine_query_tokens,
  sum(cached_tokens) AS cached_tokens,
  sum(reported_prompt_tokens) AS reported_prompt_tokens,
  sum(reported_requests) AS reported_requests,
  sum(requests) AS requests
FROM counts GROUP BY ALL HAVING sum(requests) > 0 OR sum(engine_query_tokens) > 0 ORDER BY pool, worker, rank, bin_at

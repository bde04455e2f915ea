-- How did hit rate and traffic go over time?
-- parameters: since, until, bin_s, pool, worker, and model and route when set
-- grain: one row a bin that has data
SELECT time_bucket(to_seconds($bin_s), bucket, $since::TIMESTAMP) AS bin_at,
  sum(cached_tokens) / nullif(sum(reported_prompt_tokens), 0) AS hit_rate,
  sum(hit_share_sum) / nullif(sum(reported_requests), 0) AS hit_rate_by_request,
  sum(engine_hit_tokens) / nullif(sum(engine_query_tokens), 0) AS engine_hit_rate,
  sum(cached_tokens) AS cached_tokens,
  sum(reported_prompt_tokens) AS reported_prompt_tokens,
  sum(reported_requests) AS reported_requests,
  sum(requests) AS requests,
  sum(failed) AS failed
FROM counts GROUP BY bin_at ORDER BY bin_at

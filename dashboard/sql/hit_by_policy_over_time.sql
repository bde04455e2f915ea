-- Which hit rate did each routing policy reach when?
-- parameters: since, until, bin_s, pool, worker, route, model
-- grain: one row a policy and bin that has requests
SELECT coalesce(policy, 'no decision received') AS policy, time_bucket(to_seconds($bin_s), ended_at, $since::TIMESTAMP) AS bin_at,
  sum(cached_tokens) FILTER (prompt_tokens IS NOT NULL) AS cached_tokens,
  sum(prompt_tokens) FILTER (cached_tokens IS NOT NULL) AS reported_prompt_tokens,
  sum(cached_tokens) FILTER (prompt_tokens IS NOT NULL) / nullif(sum(prompt_tokens) FILTER (cached_tokens IS NOT NULL), 0) AS hit_rate,
  count(*) FILTER (cached_tokens IS NOT NULL AND prompt_tokens IS NOT NULL) AS reported_requests,
  count(*) AS requests
FROM requests
WHERE ended_at >= $since AND ended_at < $until AND ($pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker = $worker)
  AND ($route IS NULL OR route = $route) AND ($model IS NULL OR model = $model)
GROUP BY ALL ORDER BY policy, bin_at

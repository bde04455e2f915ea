-- Which hit rate did each routing policy reach in the whole window?
-- parameters: since, until, pool, worker, route, model
-- grain: one row a policy
SELECT coalesce(policy, 'no decision received') AS policy,
  sum(cached_tokens) FILTER (prompt_tokens IS NOT NULL) AS cached_tokens,
  sum(prompt_tokens) FILTER (cached_tokens IS NOT NULL) AS reported_prompt_tokens,
  sum(cached_tokens) FILTER (prompt_tokens IS NOT NULL) / nullif(sum(prompt_tokens) FILTER (cached_tokens IS NOT NULL), 0) AS hit_rate,
  median(ttft_s) AS ttft_p50_s,
  count(*) AS requests
FROM requests
WHERE ended_at >= $since AND ended_at < $until AND ($pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker = $worker)
  AND ($route IS NULL OR route = $route) AND ($model IS NULL OR model = $model)
GROUP BY ALL ORDER BY hit_rate DESC NULLS LAST

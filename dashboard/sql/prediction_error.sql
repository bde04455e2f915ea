-- How far was the engine's cached count from what the router predicted, in blocks?
-- parameters: since, until, pool, worker, route, model
-- grain: one row a difference, capped at 10 blocks either way
SELECT greatest(-10, least(10, round((cached_tokens::BIGINT - predicted_tokens) / block_size)::INTEGER)) AS blocks, count(*) AS requests
FROM requests
WHERE predicted_tokens IS NOT NULL AND token_source IN ('exact', 'engine') AND cached_tokens IS NOT NULL AND block_size > 0 AND ended_at >= $since AND ended_at < $until
  AND ($pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker = $worker)
  AND ($route IS NULL OR route = $route) AND ($model IS NULL OR model = $model)
GROUP BY blocks ORDER BY blocks

-- Which requests failed, and how?
-- parameters: since, until, pool, worker, route, model
-- grain: one row an error, status and worker, most first
SELECT coalesce(error, 'status ' || status) AS error, status, worker, count(*) AS requests, max(ended_at) AS last_at
FROM requests
WHERE ended_at >= $since AND ended_at < $until AND (error IS NOT NULL OR status >= 400)
  AND ($pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker = $worker)
  AND ($route IS NULL OR route = $route) AND ($model IS NULL OR model = $model)
GROUP BY ALL ORDER BY requests DESC LIMIT 50

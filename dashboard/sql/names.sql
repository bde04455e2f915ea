-- Which pools, models, routes and workers can be chosen?
-- parameters: since, until
-- grain: one row a name and kind
SELECT DISTINCT 'pool' AS kind, pool AS name FROM workers WHERE pool IS NOT NULL
UNION SELECT DISTINCT 'worker', worker FROM workers WHERE worker IS NOT NULL
UNION SELECT DISTINCT 'model', model FROM workers WHERE model IS NOT NULL
UNION (SELECT 'route', route FROM latency_10s WHERE route IS NOT NULL AND bucket >= $since AND bucket < $until
  GROUP BY route ORDER BY sum(n) DESC LIMIT 200)
ORDER BY kind, name

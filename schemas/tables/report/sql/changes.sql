-- What changed meanwhile: deploys, scaling, restarts, gaps?
SELECT happened_at, kind, text, author, pool, worker, count(*) OVER () AS found
FROM changes
WHERE happened_at >= $since AND happened_at < $until AND ($pool IS NULL OR pool IS NULL OR pool = $pool)
ORDER BY happened_at DESC, worker LIMIT 20

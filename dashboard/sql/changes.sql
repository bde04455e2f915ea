-- What changed lately?
-- parameters: since, until, pool, worker, most
-- grain: one row a change, newest first
SELECT happened_at, kind, text, author, pool, worker FROM changes
WHERE happened_at >= $since AND happened_at < $until AND ($pool IS NULL OR pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker IS NULL OR worker = $worker)
ORDER BY happened_at DESC LIMIT $most

-- What changed lately?
-- parameters: since, until, pool, worker, most
-- grain: one row a change, newest first
SELECT "at", kind, text, author, pool, worker FROM changes
WHERE "at" >= $since AND "at" < $until AND ($pool IS NULL OR pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker IS NULL OR worker = $worker)
ORDER BY "at" DESC LIMIT $most

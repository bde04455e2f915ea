-- Whose events are not complete now?
SELECT pool, worker, rank, trust, trust_reason, up, last_event_at, restarts
FROM workers WHERE ($pool IS NULL OR pool = $pool) AND (coalesce(trust, 'unknown') <> 'exact' OR up = false)
ORDER BY pool, worker, rank LIMIT 20

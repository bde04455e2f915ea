-- How did load, residency and eviction of the chosen workers go over time?
-- parameters: since, until, bin_s, pool, worker
-- grain: one row a worker, rank and bin
SELECT pool, worker, rank, time_bucket(to_seconds($bin_s), bucket, $since::TIMESTAMP) AS bin_at,
  avg(running) AS running, avg(waiting) AS waiting, avg(kv_usage) AS kv_usage,
  last(resident_blocks ORDER BY bucket) FILTER (resident_blocks IS NOT NULL) AS resident_blocks,
  sum(stored_blocks) AS stored_blocks, sum(removed_blocks) AS removed_blocks
FROM worker_10s
WHERE bucket >= $since AND bucket < $until AND ($pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker = $worker)
GROUP BY ALL ORDER BY pool, worker, rank, bin_at

-- The building block `counts`: counters a worker, rank and 10 s, filtered by pool and worker.
SELECT * FROM worker_10s
WHERE bucket >= $since AND bucket < $until AND ($pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker = $worker)

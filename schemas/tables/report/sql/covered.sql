-- For which part of the time are there any counts?
SELECT min(bucket) AS first_at, max(bucket) + INTERVAL 10 SECOND AS last_at
FROM worker_10s WHERE bucket >= $since AND bucket < $until AND ($pool IS NULL OR pool = $pool)

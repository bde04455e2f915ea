-- How did the TTFT percentiles go over time?
-- parameters: since, until, bin_s, pool, worker, route, measure
-- grain: one row a bin that has requests; merged from log-bucket histograms, within 1 %
WITH merged AS (
  SELECT time_bucket(to_seconds($bin_s), bucket, $since::TIMESTAMP) AS bin_at, log_bucket, sum(n) AS n FROM latency_10s
  WHERE measure = $measure AND bucket >= $since AND bucket < $until AND ($pool IS NULL OR pool = $pool)
    AND ($worker IS NULL OR worker = $worker) AND ($route IS NULL OR route = $route)
  GROUP BY ALL
), running AS (
  SELECT bin_at, log_bucket, sum(n) OVER (PARTITION BY bin_at ORDER BY log_bucket) AS upto, sum(n) OVER (PARTITION BY bin_at) AS total FROM merged
)
SELECT bin_at, max(total) AS n,
  1e-4 * pow(1.02, min(log_bucket) FILTER (upto >= 0.5 * total) + 0.5) AS p50_s,
  1e-4 * pow(1.02, min(log_bucket) FILTER (upto >= 0.9 * total) + 0.5) AS p90_s,
  1e-4 * pow(1.02, min(log_bucket) FILTER (upto >= 0.99 * total) + 0.5) AS p99_s
FROM running GROUP BY bin_at ORDER BY bin_at

-- Which time to first token was not exceeded by half, 90 % and 99 % of each worker's requests? Log buckets; NULL worker: all together.
WITH counted AS (
  SELECT pool, worker, grouping(worker) = 1 AS total, log_bucket, sum(n) AS n
  FROM latency_10s
  WHERE measure = 'ttft' AND bucket >= $since AND bucket < $until AND ($pool IS NULL OR pool = $pool)
  GROUP BY GROUPING SETS ((pool, worker, log_bucket), (log_bucket))
), upto AS (
  SELECT *, sum(n) OVER (PARTITION BY total, pool, worker ORDER BY log_bucket) AS upto, sum(n) OVER (PARTITION BY total, pool, worker) AS requests
  FROM counted
)
SELECT pool, worker, total, any_value(requests) AS requests,
  min(log_bucket) FILTER (upto >= 0.5 * requests) AS p50_bucket,
  min(log_bucket) FILTER (upto >= 0.9 * requests) AS p90_bucket,
  min(log_bucket) FILTER (upto >= 0.99 * requests) AS p99_bucket
FROM upto GROUP BY pool, worker, total ORDER BY total DESC, pool, worker

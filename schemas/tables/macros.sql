-- What share of prompt tokens was found in the cache between two times (UTC)? NULL: nothing was reported.
CREATE MACRO hit_rate(since, until) AS (
  SELECT sum(cached_tokens) / nullif(sum(reported_prompt_tokens), 0)
  FROM worker_10s WHERE bucket >= since AND bucket < until
);
COMMENT ON MACRO hit_rate IS 'hit_rate(since, until): token-weighted share of prompt tokens found in the cache, from engine reports; UTC.';

-- Which TTFT in seconds was not exceeded by the share q of a worker's requests between two times? worker NULL: all. Within 1 %.
CREATE MACRO ttft(worker_name, q, since, until) AS (
  SELECT min(1e-4 * pow(1.02, log_bucket + 0.5)) FROM (
    SELECT log_bucket, sum(sum(n)) OVER (ORDER BY log_bucket) AS upto, sum(sum(n)) OVER () AS total
    FROM latency_10s
    WHERE measure = 'ttft' AND bucket >= since AND bucket < until AND (worker_name IS NULL OR worker = worker_name)
    GROUP BY log_bucket
  ) WHERE upto >= q * total
);
COMMENT ON MACRO ttft IS 'ttft(worker, q, since, until): TTFT percentile in seconds, merged from log-bucket histograms, within 1 %; worker NULL: all.';

-- How much of its prompts did each worker find in its cache, by each source that tells? Ranks are added up; worker NULL: all together.
SELECT pool, worker, grouping(worker) = 1 AS total, sum(requests) AS requests, sum(failed) AS failed,
  sum(cached_tokens) AS cached_tokens, sum(reported_prompt_tokens) AS reported_prompt_tokens, sum(reported_requests) AS reported_requests,
  sum(event_hit_tokens) AS event_hit_tokens, sum(event_prompt_tokens) AS event_prompt_tokens, sum(event_requests) AS event_requests,
  sum(event_mismatches) AS event_mismatches, sum(engine_hit_tokens) AS engine_hit_tokens, sum(engine_query_tokens) AS engine_query_tokens,
  sum(lost_batches) AS lost_batches, sum(preemptions) AS preemptions
FROM worker_10s
WHERE bucket >= $since AND bucket < $until AND ($pool IS NULL OR pool = $pool)
GROUP BY GROUPING SETS ((pool, worker), ())
HAVING count(*) > 0
ORDER BY total DESC, pool, worker

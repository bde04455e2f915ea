-- What did each worker serve, hit, hold and lose in the window?
-- parameters: since, until, pool, worker, and model and route when set
-- grain: one row a worker and rank
SELECT pool, worker, rank,
  sum(requests) AS requests,
  sum(failed) AS failed,
  sum(prompt_tokens) AS prompt_tokens,
  sum(cached_tokens) AS cached_tokens,
  sum(reported_prompt_tokens) AS reported_prompt_tokens,
  sum(reported_requests) AS reported_requests,
  sum(cached_tokens) / nullif(sum(reported_prompt_tokens), 0) AS hit_rate,
  sum(hit_share_sum) / nullif(sum(reported_requests), 0) AS hit_rate_by_request,
  sum(engine_hit_tokens) / nullif(sum(engine_query_tokens), 0) AS engine_hit_rate,
  avg(running) AS running,
  avg(waiting) AS waiting,
  avg(kv_usage) AS kv_usage,
  sum(stored_blocks) AS stored_blocks,
  sum(removed_blocks) AS removed_blocks,
  sum(clears) AS clears,
  sum(lost_batches) AS lost_batches,
  sum(preemptions) AS preemptions
FROM counts GROUP BY ALL ORDER BY pool, worker, rank

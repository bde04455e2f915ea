-- What are the hit rate, traffic and failures of the window?
-- parameters: since, until, pool, worker, and model and route when set
-- grain: one row
SELECT
  sum(cached_tokens) AS cached_tokens,
  sum(reported_prompt_tokens) AS reported_prompt_tokens,
  sum(cached_tokens) / nullif(sum(reported_prompt_tokens), 0) AS hit_rate,
  sum(hit_share_sum) / nullif(sum(reported_requests), 0) AS hit_rate_by_request,
  sum(reported_requests) AS reported_requests,
  sum(requests) AS requests,
  sum(failed) AS failed,
  sum(prompt_tokens) AS prompt_tokens,
  sum(engine_hit_tokens) AS engine_hit_tokens,
  sum(engine_query_tokens) AS engine_query_tokens,
  sum(engine_hit_tokens) / nullif(sum(engine_query_tokens), 0) AS engine_hit_rate,
  min(bucket) FILTER (requests > 0) AS first_bucket
FROM counts

-- Which prefixes were computed again most?
SELECT pool, prefix, depth_tokens, model, route, tenant, template, snippet, lost_tokens, error_tokens, requests, avoidable_tokens, top_cause,
  lost_s, gpu_s, money, currency, workers, copies, gone_p50_s, idle_p50_s, example_request_id, windows, count(*) OVER () AS found, sum(lost_tokens) OVER () AS found_tokens
FROM hotspots($since, $until, in_pool := $pool) ORDER BY lost_tokens DESC, prefix LIMIT $top

-- How full were the caches for what they were asked? Worker NULL: the pool; the worst window, and the newest.
SELECT pool, worker, count(*) AS windows, max(pressure) AS worst, arg_max(window_start, pressure) AS worst_at,
  arg_max_null(pressure, window_start) AS newest, avg(pressure) AS mean, count(*) FILTER (pressure > 1) AS over,
  count(pressure) AS told, arg_max_null(capacity_blocks, window_start) AS capacity_blocks, max(working_set_blocks) AS working_set_blocks,
  max(active_blocks) AS active_blocks, max(active_sessions) AS active_sessions, arg_max_null(duplication, window_start) AS duplication,
  arg_max_null(duplicate_tokens, window_start) AS duplicate_tokens, arg_max(lifetime_p50_s, window_start) AS lifetime_p50_s,
  arg_max(idle_p50_s, window_start) AS idle_p50_s, arg_max(return_p50_s, window_start) AS return_p50_s,
  sum(returned_blocks) AS returned_blocks, arg_max(growth_p50_tokens, window_start) AS growth_p50_tokens
FROM pressure
WHERE window_start + window_s * INTERVAL 1 SECOND > $since AND window_start < $until AND ($pool IS NULL OR pool = $pool)
GROUP BY pool, worker ORDER BY pool, worker NULLS FIRST

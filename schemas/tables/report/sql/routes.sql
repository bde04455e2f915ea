-- Which routes lose most of what somebody can act on?
SELECT c.pool AS pool, route, sum(tokens) AS tokens, coalesce(sum(tokens) FILTER (cause = 'hit'), 0) AS hit_tokens,
  coalesce(sum(tokens) FILTER (cause_avoidable(cause)), 0) AS avoidable_tokens, sum(lost_s) FILTER (cause_avoidable(cause)) AS avoidable_s,
  sum(lost_s * gpus) FILTER (cause_avoidable(cause)) AS gpu_s, sum(lost_s * gpus * price) FILTER (cause_avoidable(cause)) / 3600 AS money,
  any_value(currency) AS currency,
  arg_max(cause, tokens) FILTER (cause_avoidable(cause)) AS top_cause
FROM (
  SELECT pool, route, cause, sum(tokens) AS tokens, sum(lost_s) AS lost_s
  FROM loss_10s WHERE bucket >= $since AND bucket < $until AND ($pool IS NULL OR pool = $pool)
  GROUP BY pool, route, cause
) c LEFT JOIN gpu_prices() g ON g.pool = c.pool
GROUP BY c.pool, route ORDER BY avoidable_tokens DESC, tokens DESC, route LIMIT $top

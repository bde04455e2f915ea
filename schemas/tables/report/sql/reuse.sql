-- What hit rate would caches of another size or lifetime have had? Pools as one cache, and all workers with caches of their own.
SELECT pool, worker IS NULL AS whole, kind, scale, tier, ttl_s, sum(hit_tokens) AS hit_tokens, sum(prompt_tokens) AS prompt_tokens,
  max(error) AS error, bool_and(method = 'exact') AS exact, any_value(method) FILTER (method <> 'exact') AS method,
  max(capacity_blocks) AS capacity_blocks, count(DISTINCT window_start) AS windows
FROM reuse_curves
WHERE window_start + window_s * INTERVAL 1 SECOND > $since AND window_start < $until AND ($pool IS NULL OR pool = $pool)
  AND ((kind = 'capacity' AND scale IS NOT NULL) OR kind = 'ttl')
GROUP BY pool, whole, kind, scale, tier, ttl_s
ORDER BY pool, whole DESC, kind, scale, tier, ttl_s

-- How many prompt tokens were computed again although some worker held them, over time?
-- parameters: since, until, bin_s, pool, worker, route, model
-- grain: one row a bin that has requests with a known prompt, overlap and report
SELECT time_bucket(to_seconds($bin_s), ended_at, $since::TIMESTAMP) AS bin_at,
  sum(greatest(least(best_overlap_tokens, prompt_tokens)::BIGINT - cached_tokens, 0)) AS computed_again_tokens,
  sum(greatest(prompt_tokens::BIGINT - cached_tokens, 0)) AS computed_tokens,
  sum(prompt_tokens) AS known_prompt_tokens
FROM requests
-- least and greatest pass over NULL, so only requests of which all three are known may reach them; the overlap of text prompts is a guess.
WHERE token_source IN ('exact', 'engine') AND best_overlap_tokens IS NOT NULL AND prompt_tokens IS NOT NULL AND cached_tokens IS NOT NULL AND ended_at >= $since AND ended_at < $until AND ($pool IS NULL OR pool = $pool) AND ($worker IS NULL OR worker = $worker)
  AND ($route IS NULL OR route = $route) AND ($model IS NULL OR model = $model)
GROUP BY bin_at ORDER BY bin_at

-- How many requests are there, and of how many is a half missing, or the causes not told?
SELECT count(*) AS requests, count(*) FILTER (decision_missing) AS decision_missing, count(*) FILTER (outcome_missing) AS outcome_missing,
  count(*) FILTER (ended_at IS NULL AND NOT coalesce(outcome_missing, false)) AS in_flight,
  count(*) FILTER (ended_at IS NOT NULL AND status < 400 AND hit_tokens IS NULL) AS hit_unknown,
  count(*) FILTER (unexplained_tokens > 0) AS unexplained_requests,
  count(*) FILTER (loss_trust IS NOT NULL AND loss_trust <> 'exact') AS untrusted
FROM requests
WHERE coalesce(started_at, ended_at) >= $since AND coalesce(started_at, ended_at) < $until AND ($pool IS NULL OR pool = $pool)

-- Did each decision get its outcome, and each outcome its decision?
-- parameters: since, until
-- grain: one row
SELECT count(*) AS requests,
  count(*) FILTER (decision_missing) AS decision_missing,
  count(*) FILTER (outcome_missing) AS outcome_missing,
  count(*) FILTER (ended_at IS NULL AND NOT coalesce(outcome_missing, false)) AS in_flight,
  count(*) FILTER (ended_at IS NOT NULL AND cached_tokens IS NULL) AS not_reported
FROM requests WHERE started_at >= $since AND started_at < $until

-- Why are tokens unexplained?
SELECT coalesce(unexplained_reason, 'no reason given') AS reason, count(*) AS requests, sum(unexplained_tokens) AS tokens
FROM requests
WHERE coalesce(started_at, ended_at) >= $since AND coalesce(started_at, ended_at) < $until AND ($pool IS NULL OR pool = $pool)
  AND unexplained_tokens > 0
GROUP BY 1 ORDER BY tokens DESC, reason LIMIT 8

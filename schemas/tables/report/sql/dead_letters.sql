-- How many records were set aside, and why?
SELECT topic, reason, count(*) AS records, max(set_aside_at) AS newest
FROM dead_letters WHERE set_aside_at >= $since AND set_aside_at < $until
GROUP BY topic, reason ORDER BY records DESC, reason LIMIT 8

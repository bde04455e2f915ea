-- Which records could not be used, and why?
-- parameters: none
-- grain: one row a topic and reason, most first
SELECT topic, reason, count(*) AS records, min(set_aside_at) AS first_at, max(set_aside_at) AS last_at, sum(size_bytes) AS size_bytes
FROM dead_letters GROUP BY topic, reason ORDER BY records DESC, topic, reason LIMIT 100

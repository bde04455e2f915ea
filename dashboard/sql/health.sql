-- What can be said about the data itself now?
-- parameters: none
-- grain: one row a check
SELECT area, subject, name, value, unit, status, detail, measured_at FROM data_health
ORDER BY list_position(['bad', 'warn', 'unknown', 'ok'], status), area, subject, name

-- What is not well with the data now?
SELECT area, subject, name, value, unit, status, detail, measured_at
FROM data_health WHERE status IN ('warn', 'bad') ORDER BY status, area, name, subject LIMIT 20
